/* SPDX-License-Identifier: Apache-2.0
 *
 * What needs an AMD GPU: kernels, code modules, and virtual memory of a device. Also part of hip_cuda.
 *
 * Each of these fails, says so on stderr, and leaves the failure in hipGetLastError, which is
 * where callers of `kernel<<<...>>>` look. Arguments are not looked at, so none are declared.
 */
#include "internal.h"

#define UNSUPPORTED(call)                                                                         \
    HIP_API hip_error call(void);                                                                 \
    hip_error call(void) { return hip_refuse(#call, HIP_ERROR_NOT_SUPPORTED); }

UNSUPPORTED(hipLaunchKernel)
UNSUPPORTED(hipModuleGetFunction)
UNSUPPORTED(hipModuleGetGlobal)
UNSUPPORTED(hipModuleLaunchKernel)
UNSUPPORTED(hipModuleLoad)
UNSUPPORTED(hipModuleUnload)

UNSUPPORTED(hipMemAddressFree)
UNSUPPORTED(hipMemAddressReserve)
UNSUPPORTED(hipMemCreate)
UNSUPPORTED(hipMemExportToShareableHandle)
UNSUPPORTED(hipMemGetAllocationGranularity)
UNSUPPORTED(hipMemGetHandleForAddressRange)
UNSUPPORTED(hipMemImportFromShareableHandle)
UNSUPPORTED(hipMemMap)
UNSUPPORTED(hipMemRelease)
UNSUPPORTED(hipMemRetainAllocationHandle)
UNSUPPORTED(hipMemSetAccess)
UNSUPPORTED(hipMemUnmap)

/* What the compiler of HIP code calls around kernels. These run when a library with kernels is
 * loaded, before anybody asks for a kernel, so they succeed; only the launch fails. */
HIP_API void **__hipRegisterFatBinary(const void *image);
HIP_API void __hipRegisterFunction(void);
HIP_API void __hipRegisterVar(void);
HIP_API void __hipUnregisterFatBinary(void **modules);
HIP_API hip_error __hipPushCallConfiguration(void);
HIP_API hip_error __hipPopCallConfiguration(void);

void **__hipRegisterFatBinary(const void *image) {
    (void)image;
    static void *modules; /* Callers keep its address and hand it back. */
    return &modules;
}

void __hipRegisterFunction(void) {}

void __hipRegisterVar(void) {}

void __hipUnregisterFatBinary(void **modules) { (void)modules; }

hip_error __hipPushCallConfiguration(void) { return hip_finish(__func__, HIP_SUCCESS); }

hip_error __hipPopCallConfiguration(void) { return hip_finish(__func__, HIP_SUCCESS); }
