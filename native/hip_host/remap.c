/* SPDX-License-Identifier: Apache-2.0
 *
 * Ordinary memory as device memory (UMBP_HIP_HOST_REMAP=1).
 *
 * A program that runs on a CPU has its tensors in private memory, which no other process can
 * map. In this mode such memory passes for device memory, and the first IPC handle for it copies
 * its whole mapping into an anonymous file and maps that file over it, at the same address and
 * with the same content. What another thread writes during that copy is lost, and the whole
 * mapping becomes shared, neighbours of the tensor included.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

static bool remap_enabled;
static pthread_once_t remap_once = PTHREAD_ONCE_INIT;
/* Held from the look at a mapping to its registration, so that it is moved only once. */
static pthread_mutex_t remap_lock = PTHREAD_MUTEX_INITIALIZER;

static void read_remap_switch(void) { remap_enabled = hip_env_enabled("UMBP_HIP_HOST_REMAP"); }

static bool remapping(void) {
    pthread_once(&remap_once, read_remap_switch);
    return remap_enabled;
}

/* The owner may have unmapped the memory, and the address may have become something else. */
static bool is_current(const region *remapped, const void *pointer) {
    mapping now;
    struct stat file;
    return mapping_find(pointer, &now) && fstat(remapped->fd, &file) == 0 &&
           now.inode == file.st_ino;
}

static bool find_registered(const void *pointer, region *found) {
    if (!registry_find(pointer, found) || (KIND_BIT(found->kind) & FILE_KINDS) == 0) {
        return false;
    }
    if (found->kind != REGION_REMAPPED || is_current(found, pointer)) {
        return true;
    }
    region gone;
    if (registry_take(found->base, KIND_BIT(REGION_REMAPPED), &gone)) {
        close(gone.fd);
    }
    return false;
}

static bool find_remappable(const void *pointer, region *found) {
    mapping present;
    region other;
    if (!remapping() || hip_check_any_device() != HIP_SUCCESS ||
        registry_find(pointer, &other) || !mapping_find(pointer, &present) ||
        !present.private_anonymous) {
        return false;
    }
    *found = (region){.base = present.base,
                      .bytes = present.bytes,
                      .kind = REGION_REMAPPED,
                      .device = hip_current_device(),
                      .fd = -1};
    return true;
}

static bool write_all(int fd, const char *source, size_t bytes) {
    while (bytes > 0) {
        ssize_t written = write(fd, source, bytes); /* the kernel stops at 2 GiB a call */
        if (written <= 0) {
            return false;
        }
        source += written;
        bytes -= (size_t)written;
    }
    return true;
}

static hip_error move_onto_file(region *moved) {
    moved->fd = mapping_create_file(moved->bytes);
    if (moved->fd < 0) {
        return HIP_ERROR_OUT_OF_MEMORY;
    }
    hip_error status = registry_add(moved);
    if (status == HIP_SUCCESS && write_all(moved->fd, moved->base, moved->bytes) &&
        mmap(moved->base, moved->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, moved->fd,
             0) == moved->base) {
        return HIP_SUCCESS;
    }
    region gone;
    if (status == HIP_SUCCESS) {
        registry_take(moved->base, KIND_BIT(REGION_REMAPPED), &gone);
        status = HIP_ERROR_MAP_FAILED;
    }
    close(moved->fd);
    return status;
}

bool device_region_find(const void *pointer, region *found) {
    pthread_mutex_lock(&remap_lock);
    bool is_device = find_registered(pointer, found) || find_remappable(pointer, found);
    pthread_mutex_unlock(&remap_lock);
    return is_device;
}

hip_error device_region_share(const void *pointer, region *shared) {
    hip_error status = HIP_SUCCESS;
    pthread_mutex_lock(&remap_lock);
    if (!find_registered(pointer, shared)) {
        status = find_remappable(pointer, shared) ? move_onto_file(shared)
                                                  : HIP_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&remap_lock);
    return status;
}
