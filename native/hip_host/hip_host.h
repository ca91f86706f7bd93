/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of HIP's public interface that the stand-in offers, as its callers see it. The library
 * beside it, hip_cuda, offers the same.
 *
 * Numbers and layouts are those of ROCm 7's binary interface. Only what is used is declared.
 */
#ifndef HIP_HOST_H
#define HIP_HOST_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    HIP_SUCCESS = 0,
    HIP_ERROR_INVALID_VALUE = 1,
    HIP_ERROR_OUT_OF_MEMORY = 2,
    HIP_ERROR_DEINITIALIZED = 4,
    HIP_ERROR_INVALID_MEMCPY_DIRECTION = 21,
    HIP_ERROR_NO_DEVICE = 100,
    HIP_ERROR_INVALID_DEVICE = 101,
    HIP_ERROR_MAP_FAILED = 205,
    HIP_ERROR_INVALID_HANDLE = 400,
    HIP_ERROR_NOT_FOUND = 500,
    HIP_ERROR_NOT_READY = 600,
    HIP_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    HIP_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    HIP_ERROR_NOT_SUPPORTED = 801,
} hip_error;

typedef enum {
    HIP_MEMCPY_HOST_TO_HOST = 0,
    HIP_MEMCPY_HOST_TO_DEVICE = 1,
    HIP_MEMCPY_DEVICE_TO_HOST = 2,
    HIP_MEMCPY_DEVICE_TO_DEVICE = 3,
    HIP_MEMCPY_DEFAULT = 4,
    HIP_MEMCPY_DEVICE_TO_DEVICE_NO_CU = 1024,
} hip_memcpy_kind;

typedef enum {
    HIP_MEMORY_UNREGISTERED = 0,
    HIP_MEMORY_HOST = 1,
    HIP_MEMORY_DEVICE = 2,
} hip_memory_type;

/* The device of memory that no device owns, as HIP reports it. */
#define HIP_INVALID_DEVICE_ID (-2)

typedef struct {
    hip_memory_type type;
    int device;
    void *device_pointer;
    void *host_pointer;
    int is_managed;
    unsigned allocation_flags;
} hip_pointer_attributes;

/* An opaque handle that one process gives to another, passed by value. */
typedef struct {
    unsigned char reserved[64];
} hip_ipc_handle;

/* The beginning of hipDeviceProp_tR0600, and its size. */
typedef struct {
    char name[256];
    unsigned char uuid[16];
    unsigned char luid[8];
    unsigned luid_node_mask;
    size_t total_bytes;
    unsigned char other[1472 - 296];
} hip_device_properties;

_Static_assert(sizeof(hip_device_properties) == 1472, "HIP's callers allocate as much");

/* A stream or an event. Work is done before a call returns, so neither has state. */
typedef struct hip_token hip_token;

#define HIP_API __attribute__((visibility("default")))

/* status.c */
HIP_API hip_error hipGetLastError(void);
HIP_API const char *hipGetErrorString(hip_error status);

/* device.c */
HIP_API hip_error hipGetDeviceCount(int *count);
HIP_API hip_error hipGetDevice(int *device);
HIP_API hip_error hipSetDevice(int device);
HIP_API hip_error hipDeviceSynchronize(void);
HIP_API hip_error hipDeviceGetAttribute(int *value, int attribute, int device);
HIP_API hip_error hipDeviceGetPCIBusId(char *text, int text_bytes, int device);
HIP_API hip_error hipDeviceCanAccessPeer(int *can_access, int device, int peer);
HIP_API hip_error hipDeviceEnablePeerAccess(int peer, unsigned flags);
HIP_API hip_error hipGetDevicePropertiesR0600(hip_device_properties *properties, int device);
HIP_API hip_error hipRuntimeGetVersion(int *version);
HIP_API hip_error hipMemGetInfo(size_t *free_bytes, size_t *total_bytes);

/* memory.c */
HIP_API hip_error hipMalloc(void **pointer, size_t bytes);
HIP_API hip_error hipExtMallocWithFlags(void **pointer, size_t bytes, unsigned flags);
HIP_API hip_error hipFree(void *pointer);
HIP_API hip_error hipHostMalloc(void **pointer, size_t bytes, unsigned flags);
HIP_API hip_error hipHostFree(void *pointer);
HIP_API hip_error hipHostRegister(void *pointer, size_t bytes, unsigned flags);
HIP_API hip_error hipHostUnregister(void *pointer);
HIP_API hip_error hipHostGetDevicePointer(void **device_pointer, void *host, unsigned flags);
HIP_API hip_error hipPointerGetAttributes(hip_pointer_attributes *attributes, const void *pointer);
HIP_API hip_error hipMemGetAddressRange(void **base, size_t *bytes, void *pointer);

/* ipc.c */
HIP_API hip_error hipIpcGetMemHandle(hip_ipc_handle *handle, void *pointer);
HIP_API hip_error hipIpcOpenMemHandle(void **pointer, hip_ipc_handle handle, unsigned flags);
HIP_API hip_error hipIpcCloseMemHandle(void *pointer);

/* copy.c */
HIP_API hip_error hipMemcpy(void *target, const void *source, size_t bytes, hip_memcpy_kind kind);
HIP_API hip_error hipMemcpyAsync(void *target, const void *source, size_t bytes,
                                 hip_memcpy_kind kind, hip_token *stream);
HIP_API hip_error hipMemcpyPeerAsync(void *target, int target_device, const void *source,
                                     int source_device, size_t bytes, hip_token *stream);
HIP_API hip_error hipMemset(void *target, int value, size_t bytes);
HIP_API hip_error hipMemsetAsync(void *target, int value, size_t bytes, hip_token *stream);

/* stream.c */
HIP_API hip_error hipStreamCreateWithFlags(hip_token **stream, unsigned flags);
HIP_API hip_error hipStreamDestroy(hip_token *stream);
HIP_API hip_error hipStreamSynchronize(hip_token *stream);
HIP_API hip_error hipStreamWaitEvent(hip_token *stream, hip_token *event, unsigned flags);
HIP_API hip_error hipEventCreateWithFlags(hip_token **event, unsigned flags);
HIP_API hip_error hipEventDestroy(hip_token *event);
HIP_API hip_error hipEventRecord(hip_token *event, hip_token *stream);
HIP_API hip_error hipEventSynchronize(hip_token *event);
HIP_API hip_error hipEventQuery(hip_token *event);

#endif
