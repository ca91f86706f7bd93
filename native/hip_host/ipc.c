/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory shared between processes of one user on one host.
 *
 * A handle names the exporting process and its open file; the importer opens that file through
 * /proc. It must therefore be allowed to look into the exporter, and the exporter must be alive.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define HANDLE_MAGIC 0x504d4255u /* "UBMP": tells a handle from random bytes */

/* What is in a handle. The inode tells the file from a later one with the same descriptor. */
typedef struct {
    uint32_t magic;
    int32_t fd;
    int64_t process_id;
    uint64_t inode;
    uint64_t bytes;
} handle_content;

_Static_assert(sizeof(handle_content) <= sizeof(hip_ipc_handle), "a handle is 64 bytes");

hip_error hipIpcGetMemHandle(hip_ipc_handle *handle, void *pointer) {
    if (handle == NULL || pointer == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    region shared;
    hip_error status = device_region_share(pointer, &shared);
    if (status != HIP_SUCCESS) {
        return hip_finish(__func__, status);
    }
    struct stat file;
    if (fstat(shared.fd, &file) != 0) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    handle_content content = {.magic = HANDLE_MAGIC,
                              .fd = shared.fd,
                              .process_id = getpid(),
                              .inode = file.st_ino,
                              .bytes = shared.bytes};
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &content, sizeof(content));
    return hip_finish_bytes(__func__, shared.bytes, HIP_SUCCESS);
}

static hip_error open_exported_file(const handle_content *content, int *fd) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%lld/fd/%d", (long long)content->process_id, content->fd);
    *fd = open(path, O_RDWR | O_CLOEXEC);
    if (*fd < 0) {
        return HIP_ERROR_MAP_FAILED;
    }
    struct stat file;
    if (fstat(*fd, &file) != 0 || file.st_ino != content->inode ||
        (uint64_t)file.st_size < content->bytes) {
        close(*fd);
        return HIP_ERROR_INVALID_HANDLE;
    }
    return HIP_SUCCESS;
}

static hip_error import_handle(const hip_ipc_handle *handle, void **pointer) {
    handle_content content;
    memcpy(&content, handle, sizeof(content));
    if (content.magic != HANDLE_MAGIC) {
        return HIP_ERROR_INVALID_HANDLE;
    }
    region imported = {
        .bytes = content.bytes, .kind = REGION_IMPORTED, .device = hip_current_device()};
    hip_error status = open_exported_file(&content, &imported.fd);
    if (status != HIP_SUCCESS) {
        return status;
    }
    void *base = mmap(NULL, imported.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, imported.fd, 0);
    if (base == MAP_FAILED) {
        close(imported.fd);
        return HIP_ERROR_MAP_FAILED;
    }
    imported.base = base;
    status = registry_add(&imported);
    if (status != HIP_SUCCESS) {
        munmap(base, imported.bytes);
        close(imported.fd);
        return status;
    }
    *pointer = base;
    return HIP_SUCCESS;
}

hip_error hipIpcOpenMemHandle(void **pointer, hip_ipc_handle handle, unsigned flags) {
    (void)flags; /* The only one enables peer access, which host memory always has. */
    hip_error status = pointer == NULL ? HIP_ERROR_INVALID_VALUE : hip_check_any_device();
    if (status == HIP_SUCCESS) {
        status = import_handle(&handle, pointer);
    }
    return hip_finish(__func__, status);
}

hip_error hipIpcCloseMemHandle(void *pointer) {
    region gone;
    if (pointer == NULL || !registry_take(pointer, KIND_BIT(REGION_IMPORTED), &gone)) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    munmap(gone.base, gone.bytes);
    close(gone.fd);
    return hip_finish(__func__, HIP_SUCCESS);
}
