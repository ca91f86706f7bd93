/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies and fills. All of them, the "Async" ones too, are done when the call returns.
 */
#include <string.h>

#include "internal.h"

static bool is_copy_kind(hip_memcpy_kind kind) {
    switch (kind) {
    case HIP_MEMCPY_HOST_TO_HOST:
    case HIP_MEMCPY_HOST_TO_DEVICE:
    case HIP_MEMCPY_DEVICE_TO_HOST:
    case HIP_MEMCPY_DEVICE_TO_DEVICE:
    case HIP_MEMCPY_DEFAULT:
    case HIP_MEMCPY_DEVICE_TO_DEVICE_NO_CU:
        return true;
    }
    return false;
}

static hip_error copy(void *target, const void *source, size_t bytes, hip_memcpy_kind kind) {
    /* HIP looks at nothing else when there is nothing to copy. */
    if (bytes == 0) {
        return HIP_SUCCESS;
    }
    if (target == NULL || source == NULL) {
        return HIP_ERROR_INVALID_VALUE;
    }
    if (!is_copy_kind(kind)) {
        return HIP_ERROR_INVALID_MEMCPY_DIRECTION;
    }
    if (!registry_fits(target, bytes) || !registry_fits(source, bytes)) {
        return HIP_ERROR_INVALID_VALUE;
    }
    memmove(target, source, bytes);
    return HIP_SUCCESS;
}

static hip_error fill(void *target, int value, size_t bytes) {
    if (bytes == 0) {
        return HIP_SUCCESS;
    }
    if (target == NULL || !registry_fits(target, bytes)) {
        return HIP_ERROR_INVALID_VALUE;
    }
    memset(target, value, bytes);
    return HIP_SUCCESS;
}

hip_error hipMemcpy(void *target, const void *source, size_t bytes, hip_memcpy_kind kind) {
    return hip_finish_bytes(__func__, bytes, copy(target, source, bytes, kind));
}

hip_error hipMemcpyAsync(void *target, const void *source, size_t bytes, hip_memcpy_kind kind,
                         hip_token *stream) {
    (void)stream;
    return hip_finish_bytes(__func__, bytes, copy(target, source, bytes, kind));
}

hip_error hipMemcpyPeerAsync(void *target, int target_device, const void *source,
                             int source_device, size_t bytes, hip_token *stream) {
    (void)stream;
    hip_error status = hip_check_device(target_device);
    if (status == HIP_SUCCESS) {
        status = hip_check_device(source_device);
    }
    if (status == HIP_SUCCESS) {
        status = copy(target, source, bytes, HIP_MEMCPY_DEVICE_TO_DEVICE);
    }
    return hip_finish_bytes(__func__, bytes, status);
}

hip_error hipMemset(void *target, int value, size_t bytes) {
    return hip_finish_bytes(__func__, bytes, fill(target, value, bytes));
}

hip_error hipMemsetAsync(void *target, int value, size_t bytes, hip_token *stream) {
    (void)stream;
    return hip_finish_bytes(__func__, bytes, fill(target, value, bytes));
}
