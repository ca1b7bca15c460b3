/* GPUs that compute nothing, preloaded before CUDA's libraries: memory is the host's, copies are real, kernels and NCCL
   do nothing and succeed, events tell the host's time. What is not here, __main__.py adds as functions that return 0.
   No header of CUDA is needed: handles are void *, enumerations int, and fields of structs lie AT the offsets that
   CUDA 13's driver_types.h gives them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#define AT(type, p, offset) (*(type *)((char *)(p) + (offset)))
typedef struct { unsigned x, y, z; } dim3;
typedef struct { char bytes[128]; } UniqueId;
typedef struct { double ms; int priority, rank, size; } Handle; /* an event, a stream or a communicator */
typedef struct { char *p; size_t n; int kind; } Block;
enum { HOST = 1, DEVICE = 2, FREE = 0, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 3, NO_DEVICE = 100 };
static const size_t TOTAL = 139ull << 30, LARGE = 1 << 16, PAGE = 2 << 20;
static Block blocks[1 << 18];
static int count;
static size_t used;
static __thread int current;
static long counts[3]; /* launches, waits of the host, copies to the host */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int devices(void) { const char *s = getenv("CUDA_STUB_GPUS"); return s ? atoi(s) : 1; }
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static int counted(int which) { __sync_fetch_and_add(&counts[which], 1); return 0; }
int stub_launch(void) { return counted(0); }
static int waited(void) { return counted(1); }
void stub_counts(long *out) { memcpy(out, counts, sizeof counts); }
static Handle *handle(void) { Handle *h = calloc(1, 4096); h->ms = now(); return h; }
#define MAKES(name) int name(void **made) { *made = handle(); return 0; } /* arguments that follow are not read */
MAKES(cudaEventCreate) MAKES(cudaEventCreateWithFlags) MAKES(cudaStreamCreate) MAKES(cudnnCreate) MAKES(cublasCreate_v2)
MAKES(cublasLtCreate) MAKES(cublasLtMatmulDescCreate) MAKES(cublasLtMatrixLayoutCreate) MAKES(cuModuleLoadDataEx)
MAKES(cublasLtMatmulPreferenceCreate) MAKES(cuModuleLoadData)

static void *reserve(size_t n, int kind) {
  char *p = mmap(0, n + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 0;
  p = (char *)(((size_t)p + PAGE - 1) & ~(PAGE - 1));
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < count && blocks[i].kind) i++;
  if (i == count) count++;
  blocks[i] = (Block){p, n, kind};
  pthread_mutex_unlock(&lock);
  return p;
}
static Block *find(const void *p) { /* the block that holds an address */
  for (Block *b = blocks; b < blocks + count; b++)
    if (b->kind && (char *)p >= b->p && (char *)p < b->p + b->n) return b;
  return 0;
}
static int release(void *p) {
  pthread_mutex_lock(&lock);
  Block *b = p ? find(p) : 0;
  if (b && b->kind == DEVICE) used -= b->n;
  if (b) { b->kind = FREE; munmap(b->p, b->n); }
  pthread_mutex_unlock(&lock);
  return 0;
}
static int copy(void *to, const void *from, size_t n, int kind) {
  if (kind == 2) counted(2);
  if (kind != 3 || n < LARGE) memmove(to, from, n); /* between GPUs' memories large ones would only take time */
  return 0;
}

/* Runtime: devices */
int cudaGetDeviceCount(int *n) { *n = devices(); return *n ? 0 : NO_DEVICE; }
int cudaGetDevice(int *d) { *d = current; return 0; }
int cudaSetDevice(int d) { if (d < 0 || d >= devices()) return 101; current = d; return 0; }
int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
static const int properties[][2] = { /* of an H200; of fields of 8 bytes the lower half */
  {296, 49152}, {304, 65536}, {308, 32}, {320, 1024}, /* sharedMem, regs, warpSize and maxThreads PerBlock */
  {324, 1024}, {328, 1024}, {332, 64}, {336, 2147483647}, {340, 65535}, {344, 65535}, /* maxThreadsDim, maxGridSize */
  {352, 65536}, {360, 9}, {364, 0}, {368, 512}, {384, 132}, /* totalConstMem, major, minor, textureAlignment, SMs */
  {560, 1}, {584, 3}, {588, 1}, {592, 6144}, /* concurrentKernels, asyncEngines, unifiedAddressing, memoryBusWidth */
  {596, 50 << 20}, {604, 2048}, {624, 233472}, {632, 65536}, /* l2CacheSize; threads, sharedMem and regs of an SM */
  {672, 232448}, {688, 32}}; /* sharedMemPerBlockOptin, maxBlocksPerMultiProcessor */
static const int attributes[][2] = { /* cudaDevAttr and CU_DEVICE_ATTRIBUTE have the same numbers; the others are 1 */
  {1, 1024}, {5, 2147483647}, {6, 65535}, {8, 49152}, {10, 32}, {12, 65536}, {16, 132}, {39, 2048}, {75, 9}, {76, 0},
  {81, 233472}, {97, 232448}, {106, 32}, {110, 0}, {128, 0}};
#define COUNT(table) (sizeof table / sizeof *table)
int cudaGetDeviceProperties(void *p, int d) {
  memset(p, 0, 1008);
  strcpy(p, "NVIDIA H200");
  AT(char, p, 256) = d + 1; /* uuid */
  AT(size_t, p, 288) = TOTAL;
  for (unsigned i = 0; i < COUNT(properties); i++) AT(int, p, properties[i][0]) = properties[i][1];
  return 0;
}
int cudaDeviceGetAttribute(int *v, int which, int d) {
  *v = 1;
  for (unsigned i = 0; i < COUNT(attributes); i++) if (attributes[i][0] == which) *v = attributes[i][1];
  return 0;
}
int cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return 0; }
int cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return 0; }
int cudaDeviceCanAccessPeer(int *yes, int a, int b) { *yes = 1; return 0; }
int cudaDeviceSynchronize(void) { return waited(); }
const char *cudaGetErrorString(int e) { return e == OUT_OF_MEMORY ? "out of memory" : "error of the stub"; }
const char *cudaGetErrorName(int e) { return "cudaErrorOfTheStub"; }

/* Runtime: memory */
int cudaMalloc(void **p, size_t n) {
  *p = used + n > TOTAL ? 0 : reserve(n, DEVICE);
  if (*p) __sync_fetch_and_add(&used, n);
  return *p ? 0 : OUT_OF_MEMORY;
}
int cudaFree(void *p) { return release(p); }
int cudaMallocAsync(void **p, size_t n, void *stream) { return cudaMalloc(p, n); }
int cudaFreeAsync(void *p, void *stream) { return release(p); }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { *p = reserve(n, HOST); return *p ? 0 : OUT_OF_MEMORY; }
int cudaFreeHost(void *p) { return release(p); }
int cudaMemGetInfo(size_t *available, size_t *total) { *total = TOTAL; *available = TOTAL - used; return 0; }
int cudaPointerGetAttributes(void *a, void *p) {
  memset(a, 0, 88);
  pthread_mutex_lock(&lock);
  Block *b = find(p);
  AT(int, a, 0) = b ? b->kind : 0;
  AT(int, a, 4) = b ? current : -2;
  AT(void *, a, 8) = b ? p : 0;
  AT(void *, a, 16) = b && b->kind == HOST ? p : 0;
  pthread_mutex_unlock(&lock);
  return 0;
}
int cudaMemcpy(void *to, void *from, size_t n, int kind) { waited(); return copy(to, from, n, kind); }
int cudaMemcpyAsync(void *to, void *from, size_t n, int kind, void *stream) { return copy(to, from, n, kind); }
int cudaMemcpyPeerAsync(void *to, int a, void *from, int b, size_t n, void *stream) { return copy(to, from, n, 3); }
int cudaMemcpy2DAsync(char *to, size_t to_pitch, char *from, size_t pitch, size_t w, size_t h, int kind, void *stream) {
  for (size_t i = 0; i < h; i++) memmove(to + i * to_pitch, from + i * pitch, w);
  return 0;
}
int cudaMemset(void *p, int v, size_t n) { if (n < LARGE) memset(p, v, n); return 0; }
int cudaMemsetAsync(void *p, int v, size_t n, void *stream) { return cudaMemset(p, v, n); }
int cudaGetSymbolAddress(void **p, void *symbol) { static char zeros[1 << 20]; *p = zeros; return 0; }

/* Runtime: streams, events, kernels */
int cudaEventRecord(Handle *e, void *stream) { e->ms = now(); return 0; }
int cudaEventRecordWithFlags(Handle *e, void *stream, unsigned flags) { e->ms = now(); return 0; }
int cudaEventElapsedTime(float *ms, Handle *a, Handle *b) { *ms = b->ms - a->ms + 1e-3; return 0; }
int cudaEventSynchronize(void *e) { return waited(); }
int cudaStreamCreateWithPriority(Handle **s, unsigned flags, int p) { *s = handle(); (*s)->priority = p; return 0; }
int cudaStreamGetPriority(Handle *s, int *p) { *p = s ? s->priority : 0; return 0; }
int cudaStreamIsCapturing(void *s, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *s, int *status) { *status = 0; return 0; }
int cudaStreamSynchronize(void *s) { return waited(); }
int cudaLaunchHostFunc(void *s, void (*f)(void *), void *data) { f(data); return 0; }
int cudaStreamAddCallback(void *s, void (*f)(void *, int, void *), void *data, unsigned x) { f(s, 0, data); return 0; }
int cudaFuncGetAttributes(void *a, void *f) {
  memset(a, 0, 144);
  AT(int, a, 24) = 1024; AT(int, a, 28) = 64;      /* maxThreadsPerBlock, numRegs */
  AT(int, a, 32) = AT(int, a, 36) = 90;            /* ptxVersion, binaryVersion */
  AT(int, a, 44) = 49152;                          /* maxDynamicSharedSizeBytes */
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { *n = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { *n = 2; return 0; }
int __cudaGetKernel(void **k, void *f) { *k = f; return 0; }
typedef struct { dim3 grid, block; size_t shared; void *stream; } Call;
static __thread Call call;
int __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) { call = (Call){g, b, m, s}; return 0; }
int __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void **s) {
  *g = call.grid, *b = call.block, *m = call.shared, *s = call.stream;
  return 0;
}
void *__cudaRegisterFatBinary(void *f) { static void *x; return &x; }
char __cudaInitModule(void **h) { return 1; }
static int nothing(void) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, int *found) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void *)nothing;
  if (found) *found = 0;
  return 0;
}

/* Driver, which Triton and the allocator's expandable segments call */
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { return cudaDriverGetVersion(v); }
int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "NVIDIA H200"); return 0; }
int cuDeviceGetAttribute(int *v, int attribute, int d) { return cudaDeviceGetAttribute(v, attribute, d); }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(0x10L + d); return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)(0x10L + current); return 0; }
int cuCtxSetCurrent(void *c) { if (c) current = (long)c - 0x10; return 0; }
int cuCtxGetDevice(int *d) { *d = current; return 0; }
int cuGetErrorString(int e, const char **s) { *s = cudaGetErrorString(e); return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = m; return 0; }
int cuFuncGetAttribute(int *v, int attribute, void *f) {
  *v = attribute == 4 ? 64 : attribute == 0 ? 1024 : 0;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { *n = 2; return 0; }
int cuOccupancyMaxActiveClusters(int *n) { *n = 2; return 0; }
int cuPointerGetAttribute(void **v, int attribute, void *p) { *v = p; return 0; }
int cuMemAddressReserve(void **p, size_t n) { return (*p = reserve(n, DEVICE)) ? 0 : OUT_OF_MEMORY; }
int cuMemCreate(long *h, size_t n) { static long made; *h = ++made; return used + n > TOTAL ? OUT_OF_MEMORY : 0; }
int cuMemMap(void *p, size_t n, size_t offset, long h, unsigned long long f) {
  __sync_fetch_and_add(&used, n);
  return 0;
}
int cuMemUnmap(void *p, size_t n) { __sync_fetch_and_sub(&used, n); madvise(p, n, MADV_DONTNEED); return 0; }
int cuMemGetAllocationGranularity(size_t *g, void *properties, int o) { *g = PAGE; return 0; }
int cuStreamIsCapturing(void *s, int *status) { *status = 0; return 0; }
int cuStreamSynchronize(void *s) { return waited(); }

/* NVML, which torch's allocator asks for a fabric between GPUs; what is not written says that there is none */
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = handle(); return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { return cudaDriverGetVersion(v); }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, void *processes) { *n = 0; return 0; }

/* NCCL, cuBLAS and cuDNN */
static int joined(Handle **c, int size, int rank) { *c = handle(); (*c)->size = size; (*c)->rank = rank; return 0; }
int ncclCommInitRank(Handle **c, int n, UniqueId id, int rank) { return joined(c, n, rank); }
int ncclCommInitRankConfig(Handle **c, int n, UniqueId id, int rank, void *config) { return joined(c, n, rank); }
int ncclCommInitRankScalable(Handle **c, int n, int rank, int k, void *ids, void *config) { return joined(c, n, rank); }
int ncclCommSplit(Handle *c, int color, int key, Handle **out, void *config) { return joined(out, c->size, key); }
int ncclCommCount(Handle *c, int *n) { *n = c->size; return 0; }
int ncclCommUserRank(Handle *c, int *rank) { *rank = c->rank; return 0; }
int ncclCommGetAsyncError(void *c, int *e) { *e = 0; return 0; }
int ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n); }
const char *ncclGetErrorString(int e) { return "error of the stub"; }
const char *ncclGetLastError(void *c) { return ""; }
int cublasGetVersion_v2(void *h, int *v) { *v = 130100; return 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void *h, void *d, void *a, void *b, void *c, void *e, void *p, int wanted, void *r, int *n) {
  memset(r, 0, 64);
  return *n = 1, 0;
}
const char *cudnnGetErrorString(int e) { return "error of the stub"; }
void cudnnGetLastErrorString(char *s, size_t n) { if (n) *s = 0; }
int cudnnGetProperty(int which, int *v) { *v = which == 0 ? 9 : which == 1 ? 20 : 0; return 0; }
int cudnnBackendCreateDescriptor(int type, void **d) { *d = handle(); return 0; }
int cudnnBackendGetAttribute(void *d, int name, int type, long want, long *n, void *value) {
  if (n) *n = 1;
  if (want > 0 && value && type != 15) memset(value, 0, type == 3 || type == 5 ? 8 : 4); /* 15: a descriptor */
  return 0;
}
