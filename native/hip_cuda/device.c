/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices, and which of them is a thread's.
 *
 * Since CUDA 12 cudaSetDevice makes a context on the device, of some hundred MiB, and MORI selects
 * every device that it sees. HIP makes nothing before it is needed; neither does this file.
 */
#include <stdio.h>
#include <string.h>

#include "cuda.h"

enum {
    NONE = -1,
    /* What ROCm 7.0.0 answers: major * 10^7 + minor * 10^5 + patch. */
    RUNTIME_VERSION = 70000000,
};

/* The device that the thread has selected and CUDA has not been told of. */
static _Thread_local int awaited = NONE;

static hip_error is_in_use(int device, bool *in_use) {
    int handle = 0;
    unsigned flags = 0;
    int active = 0;
    int answer = cuda.cuDeviceGet(&handle, device);
    if (answer == 0) {
        answer = cuda.cuDevicePrimaryCtxGetState(handle, &flags, &active);
    }
    *in_use = active != 0;
    return (hip_error)answer; /* the driver keeps no last error */
}

hip_error cuda_select(int device) {
    bool in_use = false;
    hip_error status = is_in_use(device, &in_use);
    if (status == HIP_SUCCESS && in_use) {
        status = cuda_status(cuda.cudaSetDevice(device));
    }
    if (status == HIP_SUCCESS) {
        awaited = in_use ? NONE : device;
    }
    return status;
}

hip_error cuda_selected(int *device) {
    if (awaited != NONE) {
        *device = awaited;
        return HIP_SUCCESS;
    }
    return cuda_status(cuda.cudaGetDevice(device));
}

hip_error cuda_enter(void) {
    hip_error status = cuda_ready();
    if (status == HIP_SUCCESS && awaited != NONE) {
        status = cuda_status(cuda.cudaSetDevice(awaited));
        if (status == HIP_SUCCESS) {
            awaited = NONE;
        }
    }
    return status;
}

hip_error hipGetDeviceCount(int *count) {
    if (count == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    *count = 0;
    hip_error status = cuda_ready();
    if (status == HIP_SUCCESS) {
        status = cuda_status(cuda.cudaGetDeviceCount(count));
    }
    return hip_finish(__func__, status);
}

hip_error hipGetDevice(int *device) {
    hip_error status = device == NULL ? HIP_ERROR_INVALID_VALUE : cuda_ready();
    if (status == HIP_SUCCESS) {
        status = cuda_selected(device);
    }
    return hip_finish(__func__, status);
}

hip_error hipSetDevice(int device) {
    int count = 0;
    hip_error status = cuda_ready();
    if (status == HIP_SUCCESS) {
        status = cuda_status(cuda.cudaGetDeviceCount(&count));
    }
    if (status == HIP_SUCCESS) {
        bool exists = device >= 0 && device < count;
        status = exists ? cuda_select(device) : HIP_ERROR_INVALID_DEVICE;
    }
    return hip_finish(__func__, status);
}

hip_error hipDeviceSynchronize(void) { CUDA_FORWARD(cudaDeviceSynchronize()); }

hip_error hipDeviceGetAttribute(int *value, int attribute, int device) {
    /* HIP numbers attributes in its own way, and a wrong one would be believed. */
    (void)value;
    (void)attribute;
    (void)device;
    return hip_refuse(__func__, HIP_ERROR_NOT_SUPPORTED);
}

hip_error hipDeviceGetPCIBusId(char *text, int text_bytes, int device) {
    CUDA_FORWARD(cudaDeviceGetPCIBusId(text, text_bytes, device));
}

hip_error hipDeviceCanAccessPeer(int *can_access, int device, int peer) {
    CUDA_FORWARD(cudaDeviceCanAccessPeer(can_access, device, peer));
}

hip_error hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    CUDA_FORWARD(cudaDeviceEnablePeerAccess(peer, flags));
}

hip_error hipGetDevicePropertiesR0600(hip_device_properties *properties, int device) {
    hip_error status = properties == NULL ? HIP_ERROR_INVALID_VALUE : cuda_ready();
    int handle = 0;
    if (status == HIP_SUCCESS) {
        /* The structs of HIP and of each CUDA differ, so nothing is copied as a whole. What is
         * not filled is 0: no architecture, no feature. */
        memset(properties, 0, sizeof(*properties));
        status = (hip_error)cuda.cuDeviceGet(&handle, device);
    }
    if (status == HIP_SUCCESS) {
        status = (hip_error)cuda.cuDeviceGetName(properties->name, sizeof(properties->name), handle);
    }
    if (status == HIP_SUCCESS) {
        status = (hip_error)cuda.cuDeviceTotalMem_v2(&properties->total_bytes, handle);
    }
    return hip_finish(__func__, status);
}

hip_error hipRuntimeGetVersion(int *version) {
    if (version == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    *version = RUNTIME_VERSION;
    return hip_finish(__func__, HIP_SUCCESS);
}

hip_error hipMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    CUDA_FORWARD(cudaMemGetInfo(free_bytes, total_bytes));
}
