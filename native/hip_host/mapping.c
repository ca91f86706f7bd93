/* SPDX-License-Identifier: Apache-2.0
 *
 * This process's memory mappings and the anonymous files behind shareable ones.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

/* Reads one line of /proc/self/maps. False when it is not of the documented form. */
static bool parse_line(const char *line, uintptr_t *begin, uintptr_t *end, mapping *parsed) {
    char permissions[5];
    unsigned long inode;
    int name_offset = 0;
    if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %lu %n", begin, end, permissions,
               &inode, &name_offset) != 4) {
        return false;
    }
    const char *name = line + name_offset;
    parsed->base = (char *)*begin;
    parsed->bytes = *end - *begin;
    parsed->inode = (ino_t)inode;
    /* A named mapping without a file is the heap or a stack: the C library grows those in
     * place, so they must stay what they are. */
    parsed->private_anonymous =
        strcmp(permissions, "rw-p") == 0 && inode == 0 && (*name == '\0' || *name == '\n');
    return true;
}

bool mapping_find(const void *pointer, mapping *found) {
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL) {
        return false;
    }
    uintptr_t address = (uintptr_t)pointer;
    char line[4096 + 128]; /* a path of PATH_MAX behind the numbers */
    bool matched = false;
    while (!matched && fgets(line, sizeof(line), maps) != NULL) {
        uintptr_t begin;
        uintptr_t end;
        matched = parse_line(line, &begin, &end, found) && begin <= address && address < end;
    }
    fclose(maps);
    return matched;
}

int mapping_create_file(size_t bytes) {
    int fd = memfd_create("hip_host", MFD_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    if (ftruncate(fd, (off_t)bytes) != 0) {
        int cause = errno;
        close(fd);
        errno = cause;
        return -1;
    }
    return fd;
}
