/* A CUDA driver without a device: it accepts everything, does nothing, and remembers launches.
 *
 * Triton's own driver module and launcher are built against it and run unchanged, so that all there is
 * between Python and cuLaunchKernelEx can be tested and timed on a machine without a GPU.
 */
#include <stddef.h>
#include <string.h>

#include "cuda.h"

#define MAX_PARAMS 32

typedef struct {
  unsigned long long launches, modules, grid[3], threads, shared, stream, function;
  unsigned long long params[MAX_PARAMS];
} Record;

/* The last launch, and counts; written here, read by whoever loaded the library. */
Record stub_record;
/* How many parameters of a launch to copy, and the size of each. */
int stub_params, stub_sizes[MAX_PARAMS];

static unsigned long long handles;

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "error of the stub driver";
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = 227 << 10;
    break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    break;
  default:
    *value = 132;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  stub_record.modules++;
  *module = (CUmodule)++handles;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  stub_record.launches++;
  if (stub_params == 0)
    return CUDA_SUCCESS;
  stub_record.grid[0] = config->gridDimX;
  stub_record.grid[1] = config->gridDimY;
  stub_record.grid[2] = config->gridDimZ;
  stub_record.threads = config->blockDimX;
  stub_record.shared = config->sharedMemBytes;
  stub_record.stream = (unsigned long long)config->hStream;
  stub_record.function = (unsigned long long)function;
  memset(stub_record.params, 0, sizeof stub_record.params);
  for (int i = 0; i < stub_params; i++)
    memcpy(&stub_record.params[i], params[i], stub_sizes[i]);
  return CUDA_SUCCESS;
}
