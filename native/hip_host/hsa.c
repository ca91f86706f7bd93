/* SPDX-License-Identifier: Apache-2.0
 *
 * libhsa-runtime64: a runtime that starts, finds no agents and offers nothing else. hip_cuda has
 * the same.
 */
#include <stddef.h>

#define HSA_API __attribute__((visibility("default")))

typedef enum {
    HSA_SUCCESS = 0,
    HSA_ERROR = 0x1000,
    HSA_ERROR_INVALID_ARGUMENT = 0x1001,
} hsa_status;

#define UNSUPPORTED(call)                                                                         \
    HSA_API hsa_status call(void);                                                                \
    hsa_status call(void) { return HSA_ERROR; }

HSA_API hsa_status hsa_init(void);
HSA_API hsa_status hsa_shut_down(void);
HSA_API hsa_status hsa_iterate_agents(hsa_status (*visit)(void), void *context);
HSA_API hsa_status hsa_status_string(hsa_status status, const char **text);

hsa_status hsa_init(void) { return HSA_SUCCESS; }

hsa_status hsa_shut_down(void) { return HSA_SUCCESS; }

hsa_status hsa_iterate_agents(hsa_status (*visit)(void), void *context) {
    (void)visit;
    (void)context;
    return HSA_SUCCESS;
}

hsa_status hsa_status_string(hsa_status status, const char **text) {
    if (text == NULL) {
        return HSA_ERROR_INVALID_ARGUMENT;
    }
    *text = status == HSA_SUCCESS ? "success" : "not supported by this stand-in";
    return HSA_SUCCESS;
}

UNSUPPORTED(hsa_agent_get_info)
UNSUPPORTED(hsa_amd_agent_iterate_memory_pools)
UNSUPPORTED(hsa_amd_memory_lock_to_pool)
UNSUPPORTED(hsa_amd_memory_pool_get_info)
UNSUPPORTED(hsa_amd_portable_export_dmabuf)
