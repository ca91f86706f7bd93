/* SPDX-License-Identifier: Apache-2.0
 *
 * Allocation and registration of memory, and questions about pointers.
 *
 * "Device" memory is a shared mapping of an anonymous file, so that another process can open it.
 */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

static size_t round_to_pages(size_t bytes) {
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

static hip_error map_new_region(size_t bytes, region *created) {
    bool is_shared = created->kind == REGION_DEVICE;
    size_t mapped_bytes = round_to_pages(bytes);
    if (mapped_bytes < bytes) {
        return HIP_ERROR_OUT_OF_MEMORY;
    }
    int flags = is_shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    created->fd = is_shared ? mapping_create_file(mapped_bytes) : -1;
    if (is_shared && created->fd < 0) {
        return HIP_ERROR_OUT_OF_MEMORY;
    }
    void *base = mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, flags, created->fd, 0);
    if (base == MAP_FAILED) {
        if (is_shared) {
            close(created->fd);
        }
        return HIP_ERROR_OUT_OF_MEMORY;
    }
    created->base = base;
    created->bytes = mapped_bytes;
    return HIP_SUCCESS;
}

static void unmap_region(const region *gone) {
    munmap(gone->base, gone->bytes);
    if ((KIND_BIT(gone->kind) & FILE_KINDS) != 0) {
        close(gone->fd);
    }
}

static hip_error allocate(void **pointer, size_t bytes, region_kind kind) {
    if (pointer == NULL) {
        return HIP_ERROR_INVALID_VALUE;
    }
    *pointer = NULL;
    hip_error status = hip_check_any_device();
    if (status != HIP_SUCCESS || bytes == 0) {
        return status;
    }
    region created = {.kind = kind, .device = hip_current_device()};
    status = map_new_region(bytes, &created);
    if (status != HIP_SUCCESS) {
        return status;
    }
    status = registry_add(&created);
    if (status != HIP_SUCCESS) {
        unmap_region(&created);
        return status;
    }
    *pointer = created.base;
    return HIP_SUCCESS;
}

static hip_error release(void *pointer, region_kind kind) {
    if (pointer == NULL) {
        return HIP_SUCCESS;
    }
    region gone;
    if (!registry_take(pointer, KIND_BIT(kind), &gone)) {
        return HIP_ERROR_INVALID_VALUE;
    }
    unmap_region(&gone);
    return HIP_SUCCESS;
}

hip_error hipMalloc(void **pointer, size_t bytes) {
    return hip_finish_bytes(__func__, bytes, allocate(pointer, bytes, REGION_DEVICE));
}

hip_error hipExtMallocWithFlags(void **pointer, size_t bytes, unsigned flags) {
    (void)flags; /* They choose caching and coherence; host memory is always coherent. */
    return hip_finish_bytes(__func__, bytes, allocate(pointer, bytes, REGION_DEVICE));
}

hip_error hipFree(void *pointer) { return hip_finish(__func__, release(pointer, REGION_DEVICE)); }

hip_error hipHostMalloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return hip_finish_bytes(__func__, bytes, allocate(pointer, bytes, REGION_HOST));
}

hip_error hipHostFree(void *pointer) { return hip_finish(__func__, release(pointer, REGION_HOST)); }

hip_error hipHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    hip_error status = hip_check_any_device();
    if (pointer == NULL || bytes == 0) {
        status = HIP_ERROR_INVALID_VALUE;
    }
    if (status == HIP_SUCCESS) {
        region added = {.base = pointer,
                        .bytes = bytes,
                        .kind = REGION_REGISTERED,
                        .device = hip_current_device(),
                        .fd = -1};
        status = registry_add(&added);
        if (status == HIP_ERROR_INVALID_VALUE) {
            status = HIP_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        }
    }
    return hip_finish_bytes(__func__, bytes, status);
}

hip_error hipHostUnregister(void *pointer) {
    region gone;
    hip_error status = HIP_SUCCESS;
    if (pointer == NULL) {
        status = HIP_ERROR_INVALID_VALUE;
    } else if (!registry_take(pointer, KIND_BIT(REGION_REGISTERED), &gone)) {
        status = HIP_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    return hip_finish(__func__, status);
}

hip_error hipHostGetDevicePointer(void **device_pointer, void *host, unsigned flags) {
    region found;
    if (device_pointer == NULL || flags != 0 || !registry_find(host, &found) ||
        (KIND_BIT(found.kind) & FILE_KINDS) != 0) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    *device_pointer = host;
    return hip_finish(__func__, HIP_SUCCESS);
}

hip_error hipPointerGetAttributes(hip_pointer_attributes *attributes, const void *pointer) {
    if (attributes == NULL || pointer == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    memset(attributes, 0, sizeof(*attributes));
    attributes->type = HIP_MEMORY_UNREGISTERED;
    attributes->device = HIP_INVALID_DEVICE_ID;
    region found;
    if (device_region_find(pointer, &found)) {
        attributes->type = HIP_MEMORY_DEVICE;
        attributes->device = found.device;
        attributes->device_pointer = (void *)pointer;
    } else if (registry_find(pointer, &found)) {
        attributes->type = HIP_MEMORY_HOST;
        attributes->device = found.device;
        attributes->device_pointer = (void *)pointer;
        attributes->host_pointer = (void *)pointer;
    }
    return hip_finish(__func__, HIP_SUCCESS);
}

hip_error hipMemGetAddressRange(void **base, size_t *bytes, void *pointer) {
    region found;
    if (!device_region_find(pointer, &found) && !registry_find(pointer, &found)) {
        return hip_finish(__func__, HIP_ERROR_NOT_FOUND);
    }
    /* Either result may be left out. */
    if (base != NULL) {
        *base = found.base;
    }
    if (bytes != NULL) {
        *bytes = found.bytes;
    }
    return hip_finish(__func__, HIP_SUCCESS);
}
