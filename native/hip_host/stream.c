/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events. Nothing is ever pending, so they are handles and no more.
 */
#include <stdlib.h>

#include "internal.h"

struct hip_token {
    char unused;
};

static hip_error create(hip_token **token) {
    if (token == NULL) {
        return HIP_ERROR_INVALID_VALUE;
    }
    hip_error status = hip_check_any_device();
    if (status != HIP_SUCCESS) {
        return status;
    }
    *token = malloc(sizeof(**token));
    return *token == NULL ? HIP_ERROR_OUT_OF_MEMORY : HIP_SUCCESS;
}

static hip_error destroy(hip_token *token) {
    if (token == NULL) {
        return HIP_ERROR_INVALID_HANDLE;
    }
    free(token);
    return HIP_SUCCESS;
}

/* For calls that need an event. A stream may be NULL: that is the default stream. */
static hip_error check_event(const hip_token *event) {
    return event == NULL ? HIP_ERROR_INVALID_HANDLE : HIP_SUCCESS;
}

hip_error hipStreamCreateWithFlags(hip_token **stream, unsigned flags) {
    (void)flags;
    return hip_finish(__func__, create(stream));
}

hip_error hipStreamDestroy(hip_token *stream) { return hip_finish(__func__, destroy(stream)); }

hip_error hipStreamSynchronize(hip_token *stream) {
    (void)stream;
    return hip_finish(__func__, HIP_SUCCESS);
}

hip_error hipStreamWaitEvent(hip_token *stream, hip_token *event, unsigned flags) {
    (void)stream;
    (void)flags;
    return hip_finish(__func__, check_event(event));
}

hip_error hipEventCreateWithFlags(hip_token **event, unsigned flags) {
    (void)flags;
    return hip_finish(__func__, create(event));
}

hip_error hipEventDestroy(hip_token *event) { return hip_finish(__func__, destroy(event)); }

hip_error hipEventRecord(hip_token *event, hip_token *stream) {
    (void)stream;
    return hip_finish(__func__, check_event(event));
}

hip_error hipEventSynchronize(hip_token *event) { return hip_finish(__func__, check_event(event)); }

hip_error hipEventQuery(hip_token *event) { return hip_finish(__func__, check_event(event)); }
