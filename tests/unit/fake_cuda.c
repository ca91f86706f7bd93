/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA of two devices on host memory that writes down what it is asked, for test_hip_cuda.py.
 *
 * Runtime and driver are in this one library. Calls end the process with status 77 once it has put
 * itself away, as CUDA may when it is called too late.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEVICES = 2, ALLOCATIONS_MAX = 16, DEVICE_MEMORY = 2, UNREGISTERED = 0 };

typedef struct {
    char reserved[64];
} handle;

typedef struct {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
    long reserved[8]; /* as in CUDA 13 */
} attributes;

typedef struct {
    char *base;
    size_t bytes;
    int device;
} allocation;

static char log_text[1 << 14];
static size_t log_bytes;
static const char *failing_call;
static int failing_status;
static int last_error;
static int is_gone;
static int active[DEVICES];
static _Thread_local int current;
static allocation allocations[ALLOCATIONS_MAX];

static void go(void) { is_gone = 1; }

__attribute__((constructor)) static void come(void) { atexit(go); }

void fake_reset(void) {
    log_bytes = 0;
    log_text[0] = '\0';
    failing_call = NULL;
}

const char *fake_log(void) { return log_text; }

void fake_fail(const char *call, int status) {
    failing_call = strdup(call);
    failing_status = status;
}

/* Writes a call down, and returns what it shall return. */
static int note(const char *call, const char *format, ...) {
    if (is_gone) {
        _exit(77);
    }
    va_list arguments;
    va_start(arguments, format);
    log_bytes += (size_t)snprintf(log_text + log_bytes, sizeof(log_text) - log_bytes, "%s ", call);
    log_bytes += (size_t)vsnprintf(log_text + log_bytes, sizeof(log_text) - log_bytes, format,
                                   arguments);
    log_bytes += (size_t)snprintf(log_text + log_bytes, sizeof(log_text) - log_bytes, "\n");
    va_end(arguments);
    if (failing_call != NULL && strcmp(failing_call, call) == 0) {
        last_error = failing_status;
        return failing_status;
    }
    return 0;
}

static allocation *find(uintptr_t pointer) {
    for (int index = 0; index < ALLOCATIONS_MAX; index++) {
        uintptr_t base = (uintptr_t)allocations[index].base;
        if (base != 0 && base <= pointer && pointer < base + allocations[index].bytes) {
            return &allocations[index];
        }
    }
    return NULL;
}

/* ---- the runtime ---------------------------------------------------------------------- */

int cudaGetLastError(void) {
    int status = last_error;
    last_error = 0;
    return status;
}

const char *cudaGetErrorString(int status) { return status == 46 ? "forty-six" : "an error"; }

int cudaGetDeviceCount(int *count) {
    *count = DEVICES;
    return note("cudaGetDeviceCount", "");
}

int cudaGetDevice(int *device) {
    *device = current;
    return note("cudaGetDevice", "");
}

int cudaSetDevice(int device) {
    current = device;
    active[device] = 1;
    return note("cudaSetDevice", "%d", device);
}

int cudaMalloc(void **pointer, size_t bytes) {
    *pointer = malloc(bytes);
    active[current] = 1;
    for (int index = 0; index < ALLOCATIONS_MAX; index++) {
        if (allocations[index].base == NULL) {
            allocations[index] = (allocation){*pointer, bytes, current};
            break;
        }
    }
    return note("cudaMalloc", "%zu", bytes);
}

int cudaFree(void *pointer) {
    allocation *gone = find((uintptr_t)pointer);
    if (gone != NULL) {
        gone->base = NULL;
        free(pointer);
    }
    return note("cudaFree", "");
}

int cudaPointerGetAttributes(attributes *found, const void *pointer) {
    allocation *owner = find((uintptr_t)pointer);
    memset(found, 0, sizeof(*found));
    found->type = owner == NULL ? UNREGISTERED : DEVICE_MEMORY;
    found->device = owner == NULL ? -2 : owner->device;
    found->device_pointer = owner == NULL ? NULL : (void *)(uintptr_t)pointer;
    memset(found->reserved, 0xff, sizeof(found->reserved));
    return note("cudaPointerGetAttributes", "");
}

int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, void *stream) {
    memcpy(target, source, bytes);
    return note("cudaMemcpyAsync", "%zu %d %p", bytes, kind, stream);
}

int cudaMemsetAsync(void *target, int value, size_t bytes, void *stream) {
    memset(target, value, bytes);
    return note("cudaMemsetAsync", "%zu %p", bytes, stream);
}

int cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                        size_t bytes, void *stream) {
    memcpy(target, source, bytes);
    return note("cudaMemcpyPeerAsync", "%d %d %zu %p", target_device, source_device, bytes, stream);
}

int cudaIpcGetMemHandle(handle *made, void *pointer) {
    memset(made, 0, sizeof(*made));
    memcpy(made, &pointer, sizeof(pointer));
    return note("cudaIpcGetMemHandle", "");
}

int cudaIpcOpenMemHandle(void **pointer, handle given, unsigned flags) {
    memcpy(pointer, &given, sizeof(*pointer));
    return note("cudaIpcOpenMemHandle", "%u %02x", flags, (unsigned char)given.reserved[63]);
}

static uintptr_t handle_count;

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    *stream = (void *)(0x1000 + ++handle_count);
    return note("cudaStreamCreateWithFlags", "%u", flags);
}

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    *event = (void *)(0x2000 + ++handle_count);
    return note("cudaEventCreateWithFlags", "%u", flags);
}

int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    *pointer = malloc(bytes);
    return note("cudaHostAlloc", "%zu %u", bytes, flags);
}

int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)pointer;
    return note("cudaHostRegister", "%zu %u", bytes, flags);
}

int cudaHostGetDevicePointer(void **device_pointer, void *host, unsigned flags) {
    *device_pointer = host;
    return note("cudaHostGetDevicePointer", "%u", flags);
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = 5;
    *total_bytes = 7;
    return note("cudaMemGetInfo", "");
}

int cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    snprintf(text, (size_t)bytes, "bus %d", device);
    return note("cudaDeviceGetPCIBusId", "%d", device);
}

int cudaDeviceCanAccessPeer(int *can_access, int device, int peer) {
    *can_access = 1;
    return note("cudaDeviceCanAccessPeer", "%d %d", device, peer);
}

int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    return note("cudaDeviceEnablePeerAccess", "%d %u", peer, flags);
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return note("cudaStreamWaitEvent", "%p %p %u", stream, event, flags);
}

int cudaEventRecord(void *event, void *stream) {
    return note("cudaEventRecord", "%p %p", event, stream);
}

int cudaDeviceSynchronize(void) { return note("cudaDeviceSynchronize", ""); }

#define ON_A_POINTER(call)                                                                        \
    int call(void *pointer) { return note(#call, "%p", pointer); }

ON_A_POINTER(cudaEventDestroy)
ON_A_POINTER(cudaEventQuery)
ON_A_POINTER(cudaEventSynchronize)
ON_A_POINTER(cudaFreeHost)
ON_A_POINTER(cudaHostUnregister)
ON_A_POINTER(cudaIpcCloseMemHandle)
ON_A_POINTER(cudaStreamDestroy)
ON_A_POINTER(cudaStreamSynchronize)

/* ---- the driver ----------------------------------------------------------------------- */

int cuInit(unsigned flags) { return note("cuInit", "%u", flags); }

int cuDeviceGet(int *device, int index) {
    *device = index;
    return index < DEVICES ? note("cuDeviceGet", "%d", index) : 101;
}

int cuDeviceGetName(char *text, int bytes, int device) {
    snprintf(text, (size_t)bytes, "fake %d", device);
    return note("cuDeviceGetName", "%d", device);
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = 7;
    return note("cuDeviceTotalMem_v2", "%d", device);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = active[device];
    return note("cuDevicePrimaryCtxGetState", "%d", device);
}

int cuMemGetAddressRange_v2(uintptr_t *base, size_t *bytes, uintptr_t pointer) {
    allocation *owner = find(pointer);
    if (owner == NULL || owner->device != current) {
        return 1;
    }
    *base = (uintptr_t)owner->base;
    *bytes = owner->bytes;
    return note("cuMemGetAddressRange_v2", "");
}
