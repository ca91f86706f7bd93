/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies and fills.
 *
 * hipMemcpy and hipMemset go to a stream of their own and wait for it. CUDA's cudaMemcpy would go to
 * the default stream, where PyTorch computes: a copy would wait for the whole forward pass, and the
 * next pass for the copy. In ROCm builds PyTorch's streams do not wait for hipMemcpy either. So there
 * is no order between these copies and other streams; a caller that needs one waits for an event.
 */
#include <pthread.h>

#include "cuda.h"

enum {
    DEVICES_MAX = 64,
    IDLE_PER_DEVICE_MAX = 16, /* of copies at the same time, those that keep a stream */
    INVALID_KIND = -1,
};

static void *idle[DEVICES_MAX][IDLE_PER_DEVICE_MAX];
static unsigned idle_count[DEVICES_MAX];
static pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;

static hip_error take_stream(int device, void **stream) {
    *stream = NULL;
    pthread_mutex_lock(&idle_lock);
    if (device < DEVICES_MAX && idle_count[device] > 0) {
        *stream = idle[device][--idle_count[device]];
    }
    pthread_mutex_unlock(&idle_lock);
    if (*stream != NULL) {
        return HIP_SUCCESS;
    }
    return cuda_status(cuda.cudaStreamCreateWithFlags(stream, CUDA_STREAM_NON_BLOCKING));
}

static void give_back(int device, void *stream) {
    bool is_kept = false;
    pthread_mutex_lock(&idle_lock);
    if (device < DEVICES_MAX && idle_count[device] < IDLE_PER_DEVICE_MAX) {
        idle[device][idle_count[device]++] = stream;
        is_kept = true;
    }
    pthread_mutex_unlock(&idle_lock);
    if (!is_kept) {
        cuda_status(cuda.cudaStreamDestroy(stream));
    }
}

/* Enters the thread's device and takes a stream of it. */
static hip_error begin(int *device, void **stream) {
    hip_error status = cuda_enter();
    if (status == HIP_SUCCESS) {
        status = cuda_selected(device);
    }
    return status == HIP_SUCCESS ? take_stream(*device, stream) : status;
}

/* Waits, also when nothing could be queued, and says what went wrong first. */
static hip_error end(int device, void *stream, hip_error queued) {
    hip_error waited = cuda_status(cuda.cudaStreamSynchronize(stream));
    give_back(device, stream);
    return queued != HIP_SUCCESS ? queued : waited;
}

static int cuda_kind(hip_memcpy_kind kind) {
    switch (kind) {
    case HIP_MEMCPY_HOST_TO_HOST:
    case HIP_MEMCPY_HOST_TO_DEVICE:
    case HIP_MEMCPY_DEVICE_TO_HOST:
    case HIP_MEMCPY_DEVICE_TO_DEVICE:
    case HIP_MEMCPY_DEFAULT:
        return (int)kind; /* numbered as in CUDA */
    case HIP_MEMCPY_DEVICE_TO_DEVICE_NO_CU:
        return HIP_MEMCPY_DEVICE_TO_DEVICE; /* which engine copies is CUDA's own choice */
    }
    return INVALID_KIND;
}

static hip_error check(const void *target, const void *source, hip_memcpy_kind kind) {
    if (target == NULL || source == NULL) {
        return HIP_ERROR_INVALID_VALUE;
    }
    return cuda_kind(kind) == INVALID_KIND ? HIP_ERROR_INVALID_MEMCPY_DIRECTION : HIP_SUCCESS;
}

static hip_error copy(void *target, const void *source, size_t bytes, hip_memcpy_kind kind) {
    int device = 0;
    void *stream = NULL;
    hip_error status = check(target, source, kind);
    if (status == HIP_SUCCESS) {
        status = begin(&device, &stream);
    }
    if (status != HIP_SUCCESS) {
        return status;
    }
    status = cuda_status(cuda.cudaMemcpyAsync(target, source, bytes, cuda_kind(kind), stream));
    return end(device, stream, status);
}

static hip_error fill(void *target, int value, size_t bytes) {
    int device = 0;
    void *stream = NULL;
    hip_error status = target == NULL ? HIP_ERROR_INVALID_VALUE : begin(&device, &stream);
    if (status != HIP_SUCCESS) {
        return status;
    }
    status = cuda_status(cuda.cudaMemsetAsync(target, value, bytes, stream));
    return end(device, stream, status);
}

hip_error hipMemcpy(void *target, const void *source, size_t bytes, hip_memcpy_kind kind) {
    /* HIP looks at nothing else when there is nothing to copy. */
    hip_error status = bytes == 0 ? HIP_SUCCESS : copy(target, source, bytes, kind);
    return hip_finish_bytes(__func__, bytes, status);
}

hip_error hipMemcpyAsync(void *target, const void *source, size_t bytes, hip_memcpy_kind kind,
                         hip_token *stream) {
    hip_error status = bytes == 0 ? HIP_SUCCESS : check(target, source, kind);
    if (status == HIP_SUCCESS) {
        status = cuda_enter();
    }
    if (status == HIP_SUCCESS && bytes > 0) {
        status = cuda_status(cuda.cudaMemcpyAsync(target, source, bytes, cuda_kind(kind), stream));
    }
    return hip_finish_bytes(__func__, bytes, status);
}

hip_error hipMemcpyPeerAsync(void *target, int target_device, const void *source,
                             int source_device, size_t bytes, hip_token *stream) {
    CUDA_FORWARD(
        cudaMemcpyPeerAsync(target, target_device, source, source_device, bytes, stream));
}

hip_error hipMemset(void *target, int value, size_t bytes) {
    hip_error status = bytes == 0 ? HIP_SUCCESS : fill(target, value, bytes);
    return hip_finish_bytes(__func__, bytes, status);
}

hip_error hipMemsetAsync(void *target, int value, size_t bytes, hip_token *stream) {
    CUDA_FORWARD(cudaMemsetAsync(target, value, bytes, stream));
}
