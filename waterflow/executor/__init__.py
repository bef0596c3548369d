"""The executor: lanes that run the planned steps of many jobs, with admission, barriers and programs."""
