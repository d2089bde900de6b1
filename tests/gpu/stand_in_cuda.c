// Fakes the parts of CUDA's driver and runtime that Mooncake's wheel and our memory use, at the host's speed. Device memory
// is shared memory, a handle is its name, and a stream is a queue that is emptied when it is queried, unless it is held.
// mooncake_place.py builds it twice: as the driver (libcuda.so.1), and with -DRUNTIME as the runtime.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { char bytes[64]; } Handle;
#define NOT_READY 600
#define INVALID 400
#define UNSUPPORTED(name) int name(void) { return 801; }
#define NOTHING(name) int name(void) { return 0; }

#ifndef RUNTIME

typedef struct { uintptr_t base; size_t length; int is_foreign, users; char name[48]; } Allocation;
typedef struct { void *target; const void *source; size_t length; } Copy;
typedef struct { int is_alive, count; Copy copies[4096]; } Stream;
static Allocation allocations[4096];
static Stream streams[256];
static int allocation_count, stream_count, dead_asked_count;
static volatile int held;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Allocation *find(uintptr_t address) {
    for (int i = 0; i < allocation_count; i++)
        if (allocations[i].length && address - allocations[i].base < allocations[i].length) return &allocations[i];
    return NULL;
}

static uintptr_t map(const char *name, size_t length, int flags) {
    int file = shm_open(name, flags, 0600);
    if (file < 0 || ((flags & O_CREAT) && ftruncate(file, (off_t)length))) return 0;
    void *found = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return found == MAP_FAILED ? 0 : (uintptr_t)found;
}

// Functions for tests.
void stand_in_hold(int on) { held = on; }
int stand_in_dead_asked(void) { return dead_asked_count; }
int stand_in_mapped(void) {
    int count = 0;
    for (int i = 0; i < allocation_count; i++) count += allocations[i].length && allocations[i].is_foreign;
    return count;
}

// Functions of the driver that the runtime calls.
int stand_in_is_device(uintptr_t address) { return find(address) != NULL; }
int stand_in_new_stream(void **stream) {
    pthread_mutex_lock(&lock);
    streams[stream_count].is_alive = 1;
    *stream = &streams[stream_count++];
    pthread_mutex_unlock(&lock);
    return 0;
}
int stand_in_end_stream(Stream *stream) { stream->is_alive = 0; return 0; }
int stand_in_copy(Stream *stream, void *target, const void *source, size_t length) {
    pthread_mutex_lock(&lock);
    int said = stream->count < 4096 ? 0 : INVALID;
    if (!said) stream->copies[stream->count++] = (Copy){target, source, length};
    pthread_mutex_unlock(&lock);
    return said;
}
int stand_in_ask(Stream *stream) {
    pthread_mutex_lock(&lock);
    int said = stream->is_alive ? (stream->count && held ? NOT_READY : 0) : INVALID;
    dead_asked_count += !stream->is_alive;
    if (!said)
        for (int i = 0; i < stream->count; i++) memcpy(stream->copies[i].target, stream->copies[i].source, stream->copies[i].length);
    if (!said) stream->count = 0;
    pthread_mutex_unlock(&lock);
    return said;
}

int cuMemAlloc_v2(uint64_t *address, size_t length) {
    pthread_mutex_lock(&lock);
    Allocation *made = &allocations[allocation_count];
    snprintf(made->name, sizeof made->name, "/stand-in-%d-%d", getpid(), allocation_count);
    made->base = map(made->name, length, O_CREAT | O_RDWR);
    made->length = made->base ? length : 0;
    allocation_count++;
    *address = made->base;
    pthread_mutex_unlock(&lock);
    return made->base ? 0 : 2;
}
int cuMemFree_v2(uint64_t address) {
    Allocation *found = find(address);
    if (!found) return 1;
    shm_unlink(found->name);
    munmap((void *)found->base, found->length);
    found->length = 0;
    return 0;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *length, uint64_t address) {
    Allocation *found = find(address);
    if (!found) return 1;
    if (base) *base = found->base;
    if (length) *length = found->length;
    return 0;
}
int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    Allocation *found = find(address);
    if (!found || found->is_foreign) return 1;
    memset(handle, 0, sizeof *handle);
    snprintf(handle->bytes, sizeof handle->bytes, "%zu %s", found->length, found->name);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    Allocation opened = {.is_foreign = 1, .users = 1};
    if (sscanf(handle.bytes, "%zu %47s", &opened.length, opened.name) != 2) return INVALID;
    pthread_mutex_lock(&lock);
    int said = 0;
    Allocation *known = NULL;
    for (int i = 0; i < allocation_count; i++)
        if (allocations[i].length && !strcmp(allocations[i].name, opened.name)) known = &allocations[i];
    if (known && !known->is_foreign) {
        said = INVALID;  // CUDA opens no handle in the process that made it.
    } else if (known) {
        known->users++;
        *address = known->base;
    } else if ((opened.base = map(opened.name, opened.length, O_RDWR))) {
        allocations[allocation_count++] = opened;
        *address = opened.base;
    } else {
        said = INVALID;
    }
    pthread_mutex_unlock(&lock);
    return said;
}
int cuIpcCloseMemHandle(uint64_t address) {
    pthread_mutex_lock(&lock);
    Allocation *found = find(address);
    int said = found && found->is_foreign ? 0 : INVALID;
    if (!said && !--found->users) {
        munmap((void *)found->base, found->length);
        found->length = 0;
    }
    pthread_mutex_unlock(&lock);
    return said;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t length) { memset((void *)address, value, length); return 0; }
int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t length) { memcpy(target, (void *)source, length); return 0; }
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t length) { memcpy((void *)target, source, length); return 0; }
int cuGetErrorName(int error, const char **name) { *name = "STAND_IN_ERROR"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stand-in"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device + 1, 16); return 0; }
int cuDeviceCanAccessPeer(int *can, int near, int far) { *can = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &lock; return 0; }
int cuCtxGetCurrent(void **context) { *context = &lock; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuDevicePrimaryCtxRelease_v2)
UNSUPPORTED(cuMemHostAlloc) UNSUPPORTED(cuEventCreate) UNSUPPORTED(cuPointerGetAttribute)
UNSUPPORTED(cuDeviceGetAttribute) UNSUPPORTED(cuDeviceGetPCIBusId) UNSUPPORTED(cuMemAddressFree)
UNSUPPORTED(cuMemAddressReserve) UNSUPPORTED(cuMemCreate) UNSUPPORTED(cuMemExportToShareableHandle)
UNSUPPORTED(cuMemGetAllocationGranularity) UNSUPPORTED(cuMemGetHandleForAddressRange)
UNSUPPORTED(cuMemImportFromShareableHandle) UNSUPPORTED(cuMemMap) UNSUPPORTED(cuMemRelease)
UNSUPPORTED(cuMemRetainAllocationHandle) UNSUPPORTED(cuMemSetAccess) UNSUPPORTED(cuMemUnmap)
UNSUPPORTED(cuPointerSetAttribute)

#else

int stand_in_is_device(uintptr_t), stand_in_new_stream(void **), stand_in_end_stream(void *), stand_in_ask(void *);
int stand_in_copy(void *, void *, const void *, size_t), cuMemAlloc_v2(uint64_t *, size_t), cuMemFree_v2(uint64_t);
int cuIpcGetMemHandle(Handle *, uint64_t), cuIpcOpenMemHandle_v2(uint64_t *, Handle, unsigned), cuIpcCloseMemHandle(uint64_t);
typedef struct { int type, device; void *on_device, *on_host; long reserved[8]; } Attributes;

int cudaPointerGetAttributes(Attributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    found->type = stand_in_is_device((uintptr_t)address) ? 2 : 0;
    found->on_device = (void *)address;
    return 0;
}
int cudaMemcpyBatchAsync(void **targets, void **sources, size_t *lengths, size_t count, void *attributes, size_t *indices,
                         size_t attribute_count, void *stream) {
    int said = 0;
    for (size_t i = 0; i < count && !said; i++) said = stand_in_copy(stream, targets[i], sources[i], lengths[i]);
    return said;
}
int cudaIpcGetMemHandle(Handle *handle, void *address) { return cuIpcGetMemHandle(handle, (uint64_t)address); }
int cudaIpcOpenMemHandle(void **address, Handle handle, unsigned flags) { return cuIpcOpenMemHandle_v2((uint64_t *)address, handle, flags); }
int cudaIpcCloseMemHandle(void *address) { return cuIpcCloseMemHandle((uint64_t)address); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return stand_in_new_stream(stream); }
int cudaStreamDestroy(void *stream) { return stand_in_end_stream(stream); }
int cudaStreamQuery(void *stream) { return stand_in_ask(stream); }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaMalloc(void **address, size_t length) { return cuMemAlloc_v2((uint64_t *)address, length); }
int cudaFree(void *address) { return cuMemFree_v2((uint64_t)address); }
int cudaDeviceCanAccessPeer(int *can, int near, int far) { *can = 1; return 0; }
int cudaDeviceGetPCIBusId(char *text, int length, int device) { snprintf(text, length, "0000:00:00.0"); return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = &stand_in_ask; return 0; }
const char *cudaGetErrorString(int error) { return "an error of the stand-in"; }
NOTHING(cudaSetDevice) NOTHING(cudaGetLastError) NOTHING(cudaEventDestroy) NOTHING(cudaEventRecord)
NOTHING(cudaEventSynchronize) NOTHING(cudaStreamSynchronize)
UNSUPPORTED(cudaMemcpyAsync) UNSUPPORTED(cudaMemcpy) UNSUPPORTED(cudaMemset) UNSUPPORTED(cudaMemsetAsync)
UNSUPPORTED(cudaDeviceEnablePeerAccess) UNSUPPORTED(cudaFreeHost) UNSUPPORTED(cudaGetDeviceProperties)
UNSUPPORTED(cudaHostAlloc) UNSUPPORTED(cudaHostGetDevicePointer) UNSUPPORTED(cudaHostRegister)
UNSUPPORTED(cudaHostUnregister) UNSUPPORTED(cudaLaunchHostFunc)

#endif
