/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events. A handle is CUDA's own.
 */
#include "cuda.h"

enum {
    EVENT_FLAGS = 0x1 | 0x2 | 0x4, /* blocking, no timing, interprocess: as in CUDA. HIP's others
                                      say which caches an event flushes; CUDA flushes all. */
};

hip_error hipStreamCreateWithFlags(hip_token **stream, unsigned flags) {
    CUDA_FORWARD(cudaStreamCreateWithFlags((void **)stream, flags));
}

hip_error hipStreamDestroy(hip_token *stream) { CUDA_FORWARD(cudaStreamDestroy(stream)); }

hip_error hipStreamSynchronize(hip_token *stream) { CUDA_FORWARD(cudaStreamSynchronize(stream)); }

hip_error hipStreamWaitEvent(hip_token *stream, hip_token *event, unsigned flags) {
    CUDA_FORWARD(cudaStreamWaitEvent(stream, event, flags));
}

hip_error hipEventCreateWithFlags(hip_token **event, unsigned flags) {
    CUDA_FORWARD(cudaEventCreateWithFlags((void **)event, flags & EVENT_FLAGS));
}

hip_error hipEventDestroy(hip_token *event) { CUDA_FORWARD(cudaEventDestroy(event)); }

hip_error hipEventRecord(hip_token *event, hip_token *stream) {
    CUDA_FORWARD(cudaEventRecord(event, stream));
}

hip_error hipEventSynchronize(hip_token *event) { CUDA_FORWARD(cudaEventSynchronize(event)); }

hip_error hipEventQuery(hip_token *event) { CUDA_FORWARD(cudaEventQuery(event)); }
