/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices: as many as UMBP_HIP_HOST_DEVICES says, all of them this host's memory.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

enum {
    MAX_DEVICES = 64,
    /* What ROCm 7.0.0 answers: major * 10^7 + minor * 10^5 + patch. */
    RUNTIME_VERSION = 70000000,
};

static int device_count;
static pthread_once_t device_once = PTHREAD_ONCE_INIT;
static _Thread_local int current_device = 0;

static void read_device_count(void) {
    const char *text = getenv("UMBP_HIP_HOST_DEVICES");
    if (text == NULL || text[0] == '\0') {
        return;
    }
    char *end = NULL;
    long value = strtol(text, &end, 10);
    if (*end != '\0' || value < 0 || value > MAX_DEVICES) {
        fprintf(stderr, "hip_host: UMBP_HIP_HOST_DEVICES=%s: give a number from 0 to %d; using 0\n",
                text, MAX_DEVICES);
        return;
    }
    device_count = (int)value;
}

int hip_device_count(void) {
    pthread_once(&device_once, read_device_count);
    return device_count;
}

int hip_current_device(void) { return current_device; }

hip_error hip_check_any_device(void) {
    return hip_device_count() > 0 ? HIP_SUCCESS : HIP_ERROR_NO_DEVICE;
}

hip_error hip_check_device(int device) {
    if (hip_device_count() == 0) {
        return HIP_ERROR_NO_DEVICE;
    }
    return device >= 0 && device < hip_device_count() ? HIP_SUCCESS : HIP_ERROR_INVALID_DEVICE;
}

hip_error hipGetDeviceCount(int *count) {
    if (count == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    *count = hip_device_count();
    return hip_finish(__func__, hip_check_any_device());
}

hip_error hipGetDevice(int *device) {
    if (device == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    *device = current_device;
    return hip_finish(__func__, hip_check_any_device());
}

hip_error hipSetDevice(int device) {
    hip_error status = hip_check_device(device);
    if (status == HIP_SUCCESS) {
        current_device = device;
    }
    return hip_finish(__func__, status);
}

hip_error hipDeviceSynchronize(void) { return hip_finish(__func__, hip_check_any_device()); }

hip_error hipDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute;
    if (value == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    /* No feature at all: whoever asks takes the plainest road. */
    *value = 0;
    return hip_finish(__func__, hip_check_device(device));
}

hip_error hipDeviceGetPCIBusId(char *text, int text_bytes, int device) {
    hip_error status = hip_check_device(device);
    if (text == NULL || text_bytes <= 0) {
        status = HIP_ERROR_INVALID_VALUE;
    }
    if (status == HIP_SUCCESS &&
        snprintf(text, (size_t)text_bytes, "0000:%02x:00.0", (unsigned)device) >= text_bytes) {
        status = HIP_ERROR_INVALID_VALUE;
    }
    return hip_finish(__func__, status);
}

hip_error hipDeviceCanAccessPeer(int *can_access, int device, int peer) {
    hip_error status = can_access == NULL ? HIP_ERROR_INVALID_VALUE : hip_check_device(device);
    if (status == HIP_SUCCESS) {
        status = hip_check_device(peer);
    }
    if (status == HIP_SUCCESS) {
        *can_access = device != peer;
    }
    return hip_finish(__func__, status);
}

hip_error hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    return hip_finish(__func__, flags != 0 ? HIP_ERROR_INVALID_VALUE : hip_check_device(peer));
}

hip_error hipGetDevicePropertiesR0600(hip_device_properties *properties, int device) {
    hip_error status = properties == NULL ? HIP_ERROR_INVALID_VALUE : hip_check_device(device);
    if (status == HIP_SUCCESS) {
        memset(properties, 0, sizeof(*properties));
        snprintf(properties->name, sizeof(properties->name), "hip_host stand-in %d", device);
    }
    return hip_finish(__func__, status);
}

hip_error hipRuntimeGetVersion(int *version) {
    if (version == NULL) {
        return hip_finish(__func__, HIP_ERROR_INVALID_VALUE);
    }
    *version = RUNTIME_VERSION;
    return hip_finish(__func__, HIP_SUCCESS);
}

hip_error hipMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    hip_error status = hip_check_any_device();
    if (free_bytes == NULL || total_bytes == NULL) {
        status = HIP_ERROR_INVALID_VALUE;
    }
    if (status == HIP_SUCCESS) {
        size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
        *free_bytes = (size_t)sysconf(_SC_AVPHYS_PAGES) * page_bytes;
        *total_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * page_bytes;
    }
    return hip_finish(__func__, status);
}
