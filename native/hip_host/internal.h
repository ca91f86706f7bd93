/* SPDX-License-Identifier: Apache-2.0
 *
 * What the stand-in's own files share. Nothing here is exported.
 */
#ifndef HIP_HOST_INTERNAL_H
#define HIP_HOST_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "hip_host.h"

/* ---- status.c ------------------------------------------------------------------------- */

/* Ends every exported call: records an error as the thread's last one, traces, returns it. */
hip_error hip_finish(const char *call, hip_error status);
hip_error hip_finish_bytes(const char *call, size_t bytes, hip_error status);

/* Ends a call that this stand-in cannot serve: as hip_finish, and says so on stderr. */
hip_error hip_refuse(const char *call, hip_error status);

/* Whether an environment variable is set to something other than "" and "0". */
bool hip_env_enabled(const char *name);

/* ---- device.c ------------------------------------------------------------------------- */

int hip_device_count(void);
int hip_current_device(void);

/* HIP_SUCCESS, or why `device` cannot be used. */
hip_error hip_check_device(int device);

/* HIP_SUCCESS when there is any device. */
hip_error hip_check_any_device(void);

/* ---- registry.c ----------------------------------------------------------------------- */

typedef enum {
    REGION_DEVICE,     /* hipMalloc: a shared mapping of an anonymous file */
    REGION_REMAPPED,   /* the caller's own mapping, moved onto an anonymous file */
    REGION_IMPORTED,   /* another process's device memory */
    REGION_HOST,       /* hipHostMalloc */
    REGION_REGISTERED, /* the caller's memory, hipHostRegister */
} region_kind;

typedef struct {
    char *base;
    size_t bytes;
    region_kind kind;
    int device;
    int fd; /* the file behind the region, owned by it; used by the first three kinds only */
} region;

/* All calls below are thread-safe. Addresses are those of this process. */

/* Adds a region. HIP_ERROR_INVALID_VALUE when it overlaps one, HIP_ERROR_OUT_OF_MEMORY. */
hip_error registry_add(const region *added);

/* Copies the region that contains `pointer`. False when there is none. */
bool registry_find(const void *pointer, region *found);

/* Takes out the region of one of the kinds in `kind_mask` that begins at `base`. */
bool registry_take(const void *base, unsigned kind_mask, region *taken);

/* Whether [pointer, pointer + bytes) lies in one region, or touches none at its beginning. */
bool registry_fits(const void *pointer, size_t bytes);

#define KIND_BIT(kind) (1u << (kind))
#define FILE_KINDS (KIND_BIT(REGION_DEVICE) | KIND_BIT(REGION_REMAPPED) | KIND_BIT(REGION_IMPORTED))

/* ---- mapping.c ------------------------------------------------------------------------ */

/* One mapping of this process, as the kernel lists it. */
typedef struct {
    char *base;
    size_t bytes;
    ino_t inode; /* 0: no file behind it */
    bool private_anonymous; /* readable, writable, private, no file and no name */
} mapping;

/* Finds the mapping that contains `pointer`. False when there is none. */
bool mapping_find(const void *pointer, mapping *found);

/* Makes an anonymous file of `bytes` bytes. Returns its descriptor, or -1 with errno set. */
int mapping_create_file(size_t bytes);

/* ---- remap.c -------------------------------------------------------------------------- */

/* Finds the device region of `pointer`; in remap mode also ordinary memory that could be one.
 * `region.fd` is -1 for memory that could be remapped and is not yet. */
bool device_region_find(const void *pointer, region *found);

/* As device_region_find, and moves the memory onto a file first where that is needed. */
hip_error device_region_share(const void *pointer, region *shared);

#endif
