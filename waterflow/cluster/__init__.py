"""Many devices: who may run where and when, decided by the same classes live and in simulation."""
