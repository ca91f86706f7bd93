/* SPDX-License-Identifier: Apache-2.0
 *
 * The last error of each thread, error texts and the trace.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static _Thread_local hip_error last_error = HIP_SUCCESS;

static bool trace_enabled;
static pthread_once_t trace_once = PTHREAD_ONCE_INIT;

bool hip_env_enabled(const char *name) {
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' && strcmp(text, "0") != 0;
}

static void read_trace_switch(void) { trace_enabled = hip_env_enabled("UMBP_HIP_HOST_TRACE"); }

static bool tracing(void) {
    pthread_once(&trace_once, read_trace_switch);
    return trace_enabled;
}

hip_error hip_finish(const char *call, hip_error status) {
    /* A success leaves an earlier error in place, as HIP does since ROCm 7. */
    if (status != HIP_SUCCESS) {
        last_error = status;
    }
    if (tracing()) {
        fprintf(stderr, "[hip_host] %s -> %d\n", call, (int)status);
    }
    return status;
}

hip_error hip_finish_bytes(const char *call, size_t bytes, hip_error status) {
    if (status != HIP_SUCCESS) {
        last_error = status;
    }
    if (tracing()) {
        fprintf(stderr, "[hip_host] %s bytes=%zu -> %d\n", call, bytes, (int)status);
    }
    return status;
}

hip_error hip_refuse(const char *call, hip_error status) {
    fprintf(stderr, "hip_host: %s: this stand-in has no GPU and cannot do it\n", call);
    return hip_finish(call, status);
}

hip_error hipGetLastError(void) {
    hip_error status = last_error;
    last_error = HIP_SUCCESS;
    if (tracing()) {
        fprintf(stderr, "[hip_host] hipGetLastError -> %d\n", (int)status);
    }
    return status;
}

const char *hipGetErrorString(hip_error status) {
    switch (status) {
    case HIP_SUCCESS:
        return "no error";
    case HIP_ERROR_INVALID_VALUE:
        return "invalid argument";
    case HIP_ERROR_OUT_OF_MEMORY:
        return "out of memory";
    case HIP_ERROR_DEINITIALIZED:
        return "the process is ending";
    case HIP_ERROR_INVALID_MEMCPY_DIRECTION:
        return "invalid copy direction for memcpy";
    case HIP_ERROR_NO_DEVICE:
        return "no device (set UMBP_HIP_HOST_DEVICES)";
    case HIP_ERROR_INVALID_DEVICE:
        return "invalid device ordinal";
    case HIP_ERROR_MAP_FAILED:
        return "mapping of memory failed";
    case HIP_ERROR_INVALID_HANDLE:
        return "invalid resource handle";
    case HIP_ERROR_NOT_FOUND:
        return "address not found";
    case HIP_ERROR_NOT_READY:
        return "not ready";
    case HIP_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
        return "host memory is already registered";
    case HIP_ERROR_HOST_MEMORY_NOT_REGISTERED:
        return "host memory is not registered";
    case HIP_ERROR_NOT_SUPPORTED:
        return "not supported by the stand-in on host memory";
    }
    return "unknown error";
}
