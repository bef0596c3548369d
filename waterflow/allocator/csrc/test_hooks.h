// For tests alone, and not in users' builds: the CPU as a device that runs behind its host (cpu_device.h) is there
// where WATERFLOW_TEST_HOOKS is defined, and mistakes planted on purpose, to show that they are found, are made there
// alone. setup.py defines it where its environment sets it to 1, as `make build` does.
#pragma once

#ifdef WATERFLOW_TEST_HOOKS
#define WATERFLOW_PLANTED(mistake) (mistake)
#else
#define WATERFLOW_PLANTED(mistake) false
#endif
