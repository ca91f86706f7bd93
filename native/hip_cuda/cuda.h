/* SPDX-License-Identifier: Apache-2.0
 *
 * What this library uses of CUDA, and what its own files share. Nothing here is exported.
 *
 * CUDA's headers are not needed: only calls whose parameters are the same since CUDA 12 are used,
 * and of structs whose size changed only the part that did not.
 */
#ifndef HIP_CUDA_CUDA_H
#define HIP_CUDA_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../hip_host/hip_host.h"
#include "../hip_host/internal.h" /* hip_finish, hip_refuse, hip_env_enabled: see status.c */

/* cudaPointerAttributes. CUDA 13 made it longer, so there is room to spare. */
typedef struct {
    int type; /* as hip_memory_type */
    int device;
    void *device_pointer;
    void *host_pointer;
    unsigned char room[256];
} cuda_pointer_attributes;

#define CUDA_STREAM_NON_BLOCKING 1u
#define CUDA_IPC_LAZY_PEER_ACCESS 1u

/* CALL(name, parameters). All return cudaError_t, which is an int. */
#define CUDA_RUNTIME_CALLS(CALL)                                                                  \
    CALL(cudaDeviceCanAccessPeer, (int *, int, int))                                              \
    CALL(cudaDeviceEnablePeerAccess, (int, unsigned))                                             \
    CALL(cudaDeviceGetPCIBusId, (char *, int, int))                                               \
    CALL(cudaDeviceSynchronize, (void))                                                           \
    CALL(cudaEventCreateWithFlags, (void **, unsigned))                                           \
    CALL(cudaEventDestroy, (void *))                                                              \
    CALL(cudaEventQuery, (void *))                                                                \
    CALL(cudaEventRecord, (void *, void *))                                                       \
    CALL(cudaEventSynchronize, (void *))                                                          \
    CALL(cudaFree, (void *))                                                                      \
    CALL(cudaFreeHost, (void *))                                                                  \
    CALL(cudaGetDevice, (int *))                                                                  \
    CALL(cudaGetDeviceCount, (int *))                                                             \
    CALL(cudaGetLastError, (void))                                                                \
    CALL(cudaHostAlloc, (void **, size_t, unsigned))                                              \
    CALL(cudaHostGetDevicePointer, (void **, void *, unsigned))                                   \
    CALL(cudaHostRegister, (void *, size_t, unsigned))                                            \
    CALL(cudaHostUnregister, (void *))                                                            \
    CALL(cudaIpcCloseMemHandle, (void *))                                                         \
    CALL(cudaIpcGetMemHandle, (hip_ipc_handle *, void *))                                         \
    CALL(cudaIpcOpenMemHandle, (void **, hip_ipc_handle, unsigned))                               \
    CALL(cudaMalloc, (void **, size_t))                                                           \
    CALL(cudaMemGetInfo, (size_t *, size_t *))                                                    \
    CALL(cudaMemcpyAsync, (void *, const void *, size_t, int, void *))                            \
    CALL(cudaMemcpyPeerAsync, (void *, int, const void *, int, size_t, void *))                   \
    CALL(cudaMemsetAsync, (void *, int, size_t, void *))                                          \
    CALL(cudaPointerGetAttributes, (cuda_pointer_attributes *, const void *))                     \
    CALL(cudaSetDevice, (int))                                                                    \
    CALL(cudaStreamCreateWithFlags, (void **, unsigned))                                          \
    CALL(cudaStreamDestroy, (void *))                                                             \
    CALL(cudaStreamSynchronize, (void *))                                                         \
    CALL(cudaStreamWaitEvent, (void *, void *, unsigned))

/* What the runtime does not offer. All return CUresult, whose codes are the runtime's. */
#define CUDA_DRIVER_CALLS(CALL)                                                                   \
    CALL(cuDeviceGet, (int *, int))                                                               \
    CALL(cuDeviceGetName, (char *, int, int))                                                     \
    CALL(cuDevicePrimaryCtxGetState, (int, unsigned *, int *))                                    \
    CALL(cuDeviceTotalMem_v2, (size_t *, int))                                                    \
    CALL(cuInit, (unsigned))                                                                      \
    CALL(cuMemGetAddressRange_v2, (uintptr_t *, size_t *, uintptr_t))

typedef struct {
#define CUDA_FIELD(name, parameters) int(*name) parameters;
    CUDA_RUNTIME_CALLS(CUDA_FIELD)
    CUDA_DRIVER_CALLS(CUDA_FIELD)
#undef CUDA_FIELD
    const char *(*cudaGetErrorString)(int);
} cuda_calls;

/* ---- loader.c ------------------------------------------------------------------------- */

/* Valid once cuda_ready() has answered HIP_SUCCESS. */
extern cuda_calls cuda;

/* Finds CUDA at the first call. HIP_ERROR_NO_DEVICE without it; HIP_ERROR_DEINITIALIZED when the
 * process is ending, where CUDA must not be touched any more. */
hip_error cuda_ready(void);

/* ---- status.c ------------------------------------------------------------------------- */

/* Takes an answer of CUDA's for HIP's, and takes it back from CUDA's own last error. */
hip_error cuda_status(int answer);

/* ---- device.c ------------------------------------------------------------------------- */

/* As cuda_ready, and sees to it that the thread's device is the one that hipSetDevice named. */
hip_error cuda_enter(void);

/* Makes a device the thread's. One that this process does not use yet is only remembered. */
hip_error cuda_select(int device);

/* The device that the thread has selected. */
hip_error cuda_selected(int *device);

/* Forwards a call: CUDA_FORWARD(cudaFree(pointer)). */
#define CUDA_FORWARD(call)                                                                        \
    do {                                                                                          \
        hip_error forwarded_ = cuda_enter();                                                      \
        if (forwarded_ == HIP_SUCCESS) {                                                          \
            forwarded_ = cuda_status(cuda.call);                                                  \
        }                                                                                         \
        return hip_finish(__func__, forwarded_);                                                  \
    } while (0)

#endif
