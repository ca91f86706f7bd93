/* SPDX-License-Identifier: Apache-2.0
 *
 * The last error of each thread, error texts, the trace, and refusals.
 *
 * Codes need no table. HIP took its numbers from CUDA; those that only CUDA has (such as 46,
 * devices unavailable) go through as they are, with CUDA's text, and mean no success to anybody.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum {
    REFUSED_CALLS_MAX = 64, /* more than there are */
};

static _Thread_local hip_error last_error = HIP_SUCCESS;

static bool trace_enabled;
static pthread_once_t trace_once = PTHREAD_ONCE_INIT;

bool hip_env_enabled(const char *name) {
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' && strcmp(text, "0") != 0;
}

static void read_trace_switch(void) { trace_enabled = hip_env_enabled("UMBP_HIP_CUDA_TRACE"); }

static bool tracing(void) {
    pthread_once(&trace_once, read_trace_switch);
    return trace_enabled;
}

hip_error cuda_status(int answer) {
    if (answer != 0) {
        /* The runtime is PyTorch's, too, which would take our error for its own. */
        cuda.cudaGetLastError();
    }
    return (hip_error)answer;
}

hip_error hip_finish(const char *call, hip_error status) {
    /* As in HIP since ROCm 7, a success leaves an earlier error in place, and that an event has
     * not come to pass is none. */
    if (status != HIP_SUCCESS && status != HIP_ERROR_NOT_READY) {
        last_error = status;
    }
    if (tracing()) {
        fprintf(stderr, "[hip_cuda] %s -> %d\n", call, (int)status);
    }
    return status;
}

hip_error hip_finish_bytes(const char *call, size_t bytes, hip_error status) {
    if (tracing()) {
        fprintf(stderr, "[hip_cuda] %s bytes=%zu\n", call, bytes);
    }
    return hip_finish(call, status);
}

/* Whether this is the first time. A call's name is one string literal, so its address will do. */
static bool is_first_refusal(const char *call) {
    static const char *refused[REFUSED_CALLS_MAX];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    size_t index = 0;
    pthread_mutex_lock(&lock);
    while (index < REFUSED_CALLS_MAX && refused[index] != NULL && refused[index] != call) {
        index++;
    }
    bool is_first = index < REFUSED_CALLS_MAX && refused[index] == NULL;
    if (is_first) {
        refused[index] = call;
    }
    pthread_mutex_unlock(&lock);
    return is_first;
}

hip_error hip_refuse(const char *call, hip_error status) {
    if (is_first_refusal(call)) {
        fprintf(stderr, "hip_cuda: %s: not possible on an NVIDIA GPU; said once\n", call);
    }
    return hip_finish(call, status);
}

hip_error hipGetLastError(void) {
    hip_error status = last_error;
    last_error = HIP_SUCCESS;
    if (tracing()) {
        fprintf(stderr, "[hip_cuda] hipGetLastError -> %d\n", (int)status);
    }
    return status;
}

const char *hipGetErrorString(hip_error status) {
    if (cuda_ready() == HIP_SUCCESS) {
        return cuda.cudaGetErrorString((int)status);
    }
    switch (status) {
    case HIP_SUCCESS:
        return "no error";
    case HIP_ERROR_NO_DEVICE:
        return "no CUDA (stderr says what is missing)";
    case HIP_ERROR_DEINITIALIZED:
        return "the process is ending";
    default:
        return "unknown error";
    }
}
