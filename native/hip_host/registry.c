/* SPDX-License-Identifier: Apache-2.0
 *
 * Which addresses are device memory, pinned memory or registered memory.
 *
 * One array sorted by address, under one lock. Regions never overlap, so the only candidate for
 * an address is the last region that begins at or below it.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static region *regions;
static size_t region_count;
static size_t region_capacity;
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;

/* The number of regions that begin at or below `pointer`. */
static size_t count_until(const char *pointer) {
    size_t low = 0;
    size_t high = region_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (regions[middle].base <= pointer) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static region *find_locked(const char *pointer) {
    size_t below = count_until(pointer);
    if (below == 0) {
        return NULL;
    }
    region *candidate = &regions[below - 1];
    return pointer < candidate->base + candidate->bytes ? candidate : NULL;
}

static bool grow_locked(void) {
    if (region_count < region_capacity) {
        return true;
    }
    size_t capacity = region_capacity == 0 ? 16 : 2 * region_capacity;
    region *grown = realloc(regions, capacity * sizeof(*grown));
    if (grown == NULL) {
        return false;
    }
    regions = grown;
    region_capacity = capacity;
    return true;
}

static hip_error add_locked(const region *added) {
    size_t position = count_until(added->base);
    bool overlaps_next =
        position < region_count && regions[position].base < added->base + added->bytes;
    if (find_locked(added->base) != NULL || overlaps_next) {
        return HIP_ERROR_INVALID_VALUE;
    }
    if (!grow_locked()) {
        return HIP_ERROR_OUT_OF_MEMORY;
    }
    memmove(&regions[position + 1], &regions[position],
            (region_count - position) * sizeof(*regions));
    regions[position] = *added;
    region_count++;
    return HIP_SUCCESS;
}

hip_error registry_add(const region *added) {
    pthread_mutex_lock(&registry_lock);
    hip_error status = add_locked(added);
    pthread_mutex_unlock(&registry_lock);
    return status;
}

bool registry_find(const void *pointer, region *found) {
    pthread_mutex_lock(&registry_lock);
    region *match = find_locked(pointer);
    if (match != NULL) {
        *found = *match;
    }
    pthread_mutex_unlock(&registry_lock);
    return match != NULL;
}

bool registry_take(const void *base, unsigned kind_mask, region *taken) {
    pthread_mutex_lock(&registry_lock);
    region *match = find_locked(base);
    bool usable = match != NULL && match->base == (const char *)base &&
                  (KIND_BIT(match->kind) & kind_mask) != 0;
    if (usable) {
        *taken = *match;
        size_t position = (size_t)(match - regions);
        region_count--;
        memmove(match, match + 1, (region_count - position) * sizeof(*regions));
    }
    pthread_mutex_unlock(&registry_lock);
    return usable;
}

bool registry_fits(const void *pointer, size_t bytes) {
    region found;
    if (!registry_find(pointer, &found)) {
        return true;
    }
    /* A remapped or registered region is the caller's memory, which may go on behind it. */
    if (found.kind == REGION_REMAPPED || found.kind == REGION_REGISTERED) {
        return true;
    }
    size_t offset = (size_t)((const char *)pointer - found.base);
    return bytes <= found.bytes - offset;
}
