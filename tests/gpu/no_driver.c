/* The few functions of CUDA that autograd asks of fake tensors, for a machine without a driver. */
static int count = 0;
void set_device_count(int value) { count = value; }
signed char _ZN3c104cuda12device_countEv(void) { return count; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
#define NONE(name) int name(void) { return 999; }
NONE(cuCtxGetCurrent) NONE(cuCtxSetCurrent) NONE(cuDeviceGet) NONE(cuDeviceGetAttribute) NONE(cuDevicePrimaryCtxRetain)
NONE(cuFuncGetAttribute) NONE(cuFuncSetAttribute) NONE(cuFuncSetCacheConfig) NONE(cuGetErrorString)
NONE(cuLaunchCooperativeKernel) NONE(cuLaunchKernel) NONE(cuLinkAddData_v2) NONE(cuLinkComplete) NONE(cuLinkCreate_v2)
NONE(cuModuleGetFunction) NONE(cuModuleLoad) NONE(cuModuleLoadData) NONE(cuModuleLoadDataEx) NONE(cuModuleUnload)
NONE(cuOccupancyMaxActiveBlocksPerMultiprocessor) NONE(cuPointerGetAttribute) NONE(cuTensorMapEncodeTiled)
