// A CUDA whose kernels do nothing, for machines without a GPU: the functions of the driver, the runtime, cuBLAS and
// cuBLASLt that give something back. scripts/fake_gpu.py compiles it together with all others of these libraries: those
// that only set something succeed, the rest fail and name themselves.
//
// Device memory is address space that nobody writes: it reads as zeros and takes no memory.

#include <cuda.h>
#include <cuda_runtime_api.h>
#define __CUDA_FP16_H__  // cuBLAS's headers need only the names that follow, and a compiler for the host has no others
#define __CUDA_BF16_H__
struct __half;
struct __half2;
struct __nv_bfloat16;
struct __nv_bfloat162;
#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define API extern "C" __attribute__((visibility("default")))
#define GIVES(...) { __VA_ARGS__; return {}; }  // and success, of each library

// How often each was asked for, as scripts/fake_gpu.py reads it.
enum { TORCH_KERNELS, TRITON_KERNELS, PRODUCTS, COPIES, KINDS };
API std::atomic<unsigned long long> fake_counts[KINDS];
std::atomic<unsigned long long> fake_counts[KINDS];

namespace {

const char* const GIB = std::getenv("FAKE_GPU_GIB");
const size_t TOTAL_BYTES = (GIB == nullptr ? 80ull : std::strtoull(GIB, nullptr, 10)) << 30, PAGE_BYTES = 2 << 20;

struct Range {
  char* begin;
  size_t bytes;
  bool is_host;  // page-locked memory of the host
};

std::mutex mutex;
std::map<const void*, Range> ranges;  // by their end
size_t used_bytes = 0;
thread_local std::string failure;

void* allocate(size_t bytes, bool is_host) {
  bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  std::lock_guard guard(mutex);
  if (!is_host && used_bytes + bytes > TOTAL_BYTES) return nullptr;
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  auto begin = static_cast<char*>(found);
  ranges[begin + bytes] = {begin, bytes, is_host};
  if (!is_host) used_bytes += bytes;
  return found;
}

const Range* range_of(const void* address) {
  auto found = ranges.upper_bound(address);
  return found == ranges.end() || found->second.begin > address ? nullptr : &found->second;
}

void release(void* address) {
  std::lock_guard guard(mutex);
  const Range* range = range_of(address);
  if (range == nullptr) return;
  if (!range->is_host) used_bytes -= range->bytes;
  munmap(range->begin, range->bytes);
  ranges.erase(range->begin + range->bytes);
}

constexpr size_t LARGE_BYTES = 1 << 20;  // of a copy from the device to page-locked memory

void copy(void* to, const void* from, size_t bytes) {
  fake_counts[COPIES]++;
  std::lock_guard guard(mutex);
  const Range *range = range_of(to), *source = range_of(from);
  if (range != nullptr && !range->is_host) return;
  // A GPU takes none of the host's time for these, and zeros in slabs of many GiB would take real memory.
  if (range != nullptr && source != nullptr && !source->is_host && bytes >= LARGE_BYTES) return;
  memmove(to, from, bytes);
}

constexpr size_t ANY = 0x1000;  // a handle: nobody looks into it, or compares it with another

}  // namespace

API int fake_product() GIVES(fake_counts[PRODUCTS]++)
API int fake_failure(const char* name) {
  failure = std::string(name) + ": tests/gpu/fake_cuda.cpp lacks it";
  return cudaErrorNotSupported;  // the same number in the driver
}

// The device, an H100

static int attribute(int* to, int which) {
  static const std::map<int, int> attributes{
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
  };
  auto found = attributes.find(which);
  if (found == attributes.end()) return fake_failure(("device attribute " + std::to_string(which)).c_str());
  *to = found->second;
  return 0;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int) {
  *to = {};
  strcpy(to->name, "a GPU that takes no time");
  to->totalGlobalMem = TOTAL_BYTES;
  to->major = 9;
  to->multiProcessorCount = 132;
  to->warpSize = 32;
  to->regsPerMultiprocessor = 65536;
  to->sharedMemPerBlock = 49152;
  to->sharedMemPerBlockOptin = 232448;
  to->sharedMemPerMultiprocessor = 233472;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
  to->maxThreadsDim[2] = 64;
  to->maxThreadsPerMultiProcessor = 2048;
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

// The driver, which Triton and compiled code call

API CUresult cuDeviceGet(CUdevice* to, int) GIVES(*to = 0)
API CUresult cuDeviceGetAttribute(int* to, CUdevice_attribute which, CUdevice) {
  return CUresult(attribute(to, which));
}
API CUresult cuCtxGetCurrent(CUcontext* to) GIVES(*to = CUcontext(ANY))
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) GIVES(*flags = 0, *is_active = 1)
API CUresult cuGetErrorString(CUresult, const char** to) GIVES(*to = failure.c_str())
API CUresult cuModuleLoad(CUmodule* to, const char*) GIVES(*to = CUmodule(ANY))
API CUresult cuModuleLoadData(CUmodule* to, const void*) GIVES(*to = CUmodule(ANY))
API CUresult cuModuleGetFunction(CUfunction* to, CUmodule, const char*) GIVES(*to = CUfunction(ANY))
API CUresult cuFuncGetAttribute(int* to, CUfunction_attribute which, CUfunction)
    GIVES(*to = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0)
API CUresult cuLaunchKernel(
    CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**)
    GIVES(fake_counts[TRITON_KERNELS]++)
API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) GIVES(fake_counts[TRITON_KERNELS]++)
API CUresult cuPointerGetAttribute(void* to, CUpointer_attribute which, CUdeviceptr address) {
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUresult(fake_failure("an attribute of a pointer"));
  std::lock_guard guard(mutex);
  if (range_of(reinterpret_cast<void*>(address)) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(to) = address;
  return CUDA_SUCCESS;
}

// The runtime

static thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
} configuration;

API void** __cudaRegisterFatBinary(void*) {
  static void* binary;
  return &binary;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream)
    GIVES(configuration = {grid, block, shared_bytes, stream})
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream)
    GIVES(*grid = configuration.grid, *block = configuration.block, *shared_bytes = configuration.shared_bytes,
          *static_cast<void**>(stream) = configuration.stream)
API cudaError_t __cudaGetKernel(cudaKernel_t* to, const void*) GIVES(*to = cudaKernel_t(ANY))
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t)
    GIVES(fake_counts[TORCH_KERNELS]++)
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) GIVES(fake_counts[TORCH_KERNELS]++)
API cudaError_t cudaGetDeviceCount(int* to) GIVES(*to = 1)
API cudaError_t cudaGetDevice(int* to) GIVES(*to = 0)
API cudaError_t cudaDriverGetVersion(int* to) GIVES(*to = CUDA_VERSION)
API cudaError_t cudaDeviceGetAttribute(int* to, cudaDeviceAttr which, int) { return cudaError_t(attribute(to, which)); }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) GIVES(*least = 0, *greatest = -5)
API const char* cudaGetErrorName(cudaError_t) { return failure.c_str(); }
API const char* cudaGetErrorString(cudaError_t) { return failure.c_str(); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void*)
    GIVES(*to = {}, to->maxThreadsPerBlock = 1024, to->numRegs = 32, to->binaryVersion = to->ptxVersion = 90)
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* to, const void*, int, size_t, unsigned)
    GIVES(*to = 2)
API cudaError_t cudaMalloc(void** to, size_t bytes) {
  *to = allocate(bytes, false);
  return *to == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) {
  *to = allocate(bytes, true);
  return *to == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
// Memory that the program has itself, page-locked and given back.
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  auto begin = static_cast<char*>(address);
  std::lock_guard guard(mutex);
  ranges[begin + bytes] = {begin, bytes, true};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard guard(mutex);
  const Range* range = range_of(address);
  if (range != nullptr) ranges.erase(range->begin + range->bytes);
  return cudaSuccess;
}
API cudaError_t cudaFree(void* address) GIVES(release(address))
API cudaError_t cudaFreeHost(void* address) GIVES(release(address))
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total)
    GIVES(*total = TOTAL_BYTES, *free = TOTAL_BYTES - used_bytes)
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t)
    GIVES(copy(to, from, bytes))
API cudaError_t cudaMemset(void*, int, size_t) GIVES(fake_counts[COPIES]++)
API cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) GIVES(fake_counts[COPIES]++)
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void* address) {
  *to = {};
  std::lock_guard guard(mutex);
  const Range* range = range_of(address);
  if (range == nullptr) return cudaSuccess;  // memory of the host that CUDA does not know
  to->type = range->is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  to->devicePointer = const_cast<void*>(address);
  to->hostPointer = range->is_host ? to->devicePointer : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* to, unsigned, int) GIVES(*to = cudaStream_t(ANY))
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* to)
    GIVES(*to = cudaStreamCaptureStatusNone)
// torch 2.15 asks this one.
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* to, unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) GIVES(*to = cudaStreamCaptureStatusNone)
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) GIVES(*to = cudaEvent_t(ANY))
// Of inductor, which chooses among its kernels by their time.
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) GIVES(*milliseconds = 0.01f)
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** to, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *to = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (*to == nullptr) *to = dlsym(RTLD_DEFAULT, name);
  if (status != nullptr) *status = *to ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// Matrix products

using Status = cublasStatus_t;
using Layout = cublasLtMatrixLayout_t;
template <class Record>
static Status made(Record* to) GIVES(*to = static_cast<Record>(calloc(1, sizeof **to)))

API Status cublasCreate_v2(cublasHandle_t* to) GIVES(*to = cublasHandle_t(ANY))
API Status cublasGetMathMode(cublasHandle_t, cublasMath_t* to) GIVES(*to = CUBLAS_DEFAULT_MATH)
API Status cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* to, cublasComputeType_t, cudaDataType_t) { return made(to); }
API Status cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t record) GIVES(free(record))
API Status cublasLtMatrixLayoutCreate(Layout* to, cudaDataType, uint64_t, uint64_t, int64_t) { return made(to); }
API Status cublasLtMatrixLayoutDestroy(Layout record) GIVES(free(record))
API Status cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* to) { return made(to); }
API Status cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t record) GIVES(free(record))
API Status cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, Layout, Layout, Layout, Layout, cublasLtMatmulPreference_t, int,
    cublasLtMatmulHeuristicResult_t* to, int* found) GIVES(*to = {}, *found = 1)
API Status cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, Layout, const void*, Layout, const void*,
    const void*, Layout, void*, Layout, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t)
    GIVES(fake_counts[PRODUCTS]++)
