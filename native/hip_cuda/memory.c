/* SPDX-License-Identifier: Apache-2.0
 *
 * Allocation and registration of memory, questions about pointers, and memory between processes.
 *
 * Flags of HIP that CUDA does not know choose how caches are kept coherent on AMD's hardware. Host
 * memory is always coherent in CUDA, so there they are left out.
 */
#include <string.h>

#include "cuda.h"

enum {
    HOST_FLAGS = 0x1 | 0x2 | 0x4, /* portable, mapped, write-combined or I/O memory: as in CUDA */
};

static hip_error allocate(void **pointer, size_t bytes) {
    if (pointer == NULL) {
        return HIP_ERROR_INVALID_VALUE;
    }
    *pointer = NULL;
    hip_error status = cuda_enter();
    if (status == HIP_SUCCESS && bytes > 0) {
        status = cuda_status(cuda.cudaMalloc(pointer, bytes));
    }
    return status;
}

hip_error hipMalloc(void **pointer, size_t bytes) {
    return hip_finish_bytes(__func__, bytes, allocate(pointer, bytes));
}

hip_error hipExtMallocWithFlags(void **pointer, size_t bytes, unsigned flags) {
    if (flags != 0) {
        /* Device memory of kinds that CUDA does not have. */
        return hip_refuse(__func__, HIP_ERROR_NOT_SUPPORTED);
    }
    return hip_finish_bytes(__func__, bytes, allocate(pointer, bytes));
}

hip_error hipFree(void *pointer) { CUDA_FORWARD(cudaFree(pointer)); }

hip_error hipHostMalloc(void **pointer, size_t bytes, unsigned flags) {
    CUDA_FORWARD(cudaHostAlloc(pointer, bytes, flags & HOST_FLAGS));
}

hip_error hipHostFree(void *pointer) { CUDA_FORWARD(cudaFreeHost(pointer)); }

hip_error hipHostRegister(void *pointer, size_t bytes, unsigned flags) {
    CUDA_FORWARD(cudaHostRegister(pointer, bytes, flags & HOST_FLAGS));
}

hip_error hipHostUnregister(void *pointer) { CUDA_FORWARD(cudaHostUnregister(pointer)); }

hip_error hipHostGetDevicePointer(void **device_pointer, void *host, unsigned flags) {
    /* One address space: the pointer is the same on every device, so the thread's is not entered,
     * which would make a context on each that MORI asks for. */
    hip_error status = cuda_ready();
    if (status == HIP_SUCCESS) {
        status = cuda_status(cuda.cudaHostGetDevicePointer(device_pointer, host, flags));
    }
    return hip_finish(__func__, status);
}

hip_error hipPointerGetAttributes(hip_pointer_attributes *attributes, const void *pointer) {
    if (attributes == NULL || pointer == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    cuda_pointer_attributes found = {0};
    hip_error status = cuda_ready();
    if (status == HIP_SUCCESS) {
        status = cuda_status(cuda.cudaPointerGetAttributes(&found, pointer));
    }
    if (status == HIP_SUCCESS) {
        /* Types are numbered alike: unregistered, host, device, managed (3). */
        *attributes = (hip_pointer_attributes){.type = (hip_memory_type)found.type,
                                               .device = found.device,
                                               .device_pointer = found.device_pointer,
                                               .host_pointer = found.host_pointer,
                                               .is_managed = found.type == 3};
    }
    return hip_finish(__func__, status);
}

/* The driver answers for the context of the calling thread, so for a moment that is the one of the
 * device that owns the memory, which is in use already. */
static hip_error address_range(void *pointer, uintptr_t *base, size_t *bytes) {
    cuda_pointer_attributes found = {0};
    int before = 0;
    hip_error status = cuda_status(cuda.cudaPointerGetAttributes(&found, pointer));
    if (status == HIP_SUCCESS && found.type != HIP_MEMORY_DEVICE) {
        return HIP_ERROR_NOT_FOUND;
    }
    if (status == HIP_SUCCESS) {
        status = cuda_selected(&before);
    }
    if (status == HIP_SUCCESS) {
        status = cuda_select(found.device);
    }
    if (status != HIP_SUCCESS) {
        return status;
    }
    status = (hip_error)cuda.cuMemGetAddressRange_v2(base, bytes, (uintptr_t)pointer);
    hip_error restored = cuda_select(before);
    return status != HIP_SUCCESS ? status : restored;
}

hip_error hipMemGetAddressRange(void **base, size_t *bytes, void *pointer) {
    uintptr_t found = 0;
    size_t found_bytes = 0;
    hip_error status = cuda_ready();
    if (status == HIP_SUCCESS) {
        status = address_range(pointer, &found, &found_bytes);
    }
    if (status == HIP_SUCCESS && base != NULL) {
        *base = (void *)found;
    }
    if (status == HIP_SUCCESS && bytes != NULL) {
        *bytes = found_bytes;
    }
    return hip_finish(__func__, status);
}

hip_error hipIpcGetMemHandle(hip_ipc_handle *handle, void *pointer) {
    uintptr_t base = 0;
    size_t bytes = 0;
    hip_error status = handle == NULL || pointer == NULL ? HIP_ERROR_INVALID_VALUE : cuda_ready();
    if (status == HIP_SUCCESS) {
        /* A handle is of the whole allocation in HIP; CUDA asks for where that begins. */
        status = address_range(pointer, &base, &bytes);
    }
    if (status == HIP_SUCCESS) {
        status = cuda_status(cuda.cudaIpcGetMemHandle(handle, (void *)base));
    }
    return hip_finish(__func__, status);
}

hip_error hipIpcOpenMemHandle(void **pointer, hip_ipc_handle handle, unsigned flags) {
    (void)flags; /* HIP looks at none, and CUDA has only this one. */
    CUDA_FORWARD(cudaIpcOpenMemHandle(pointer, handle, CUDA_IPC_LAZY_PEER_ACCESS));
}

hip_error hipIpcCloseMemHandle(void *pointer) { CUDA_FORWARD(cudaIpcCloseMemHandle(pointer)); }
