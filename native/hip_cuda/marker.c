/* SPDX-License-Identifier: Apache-2.0
 *
 * By this a process knows that the HIP runtime that it has loaded is this one.
 */
#include "cuda.h"

HIP_API int umbp_hip_on_cuda(void);

int umbp_hip_on_cuda(void) { return 1; }
