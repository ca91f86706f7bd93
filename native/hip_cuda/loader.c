/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds CUDA when it is first needed. Nothing of CUDA is needed to build this library or to load
 * it, and a process that has a CUDA runtime, such as PyTorch's, goes on with that one: device
 * memory, streams and errors of two runtimes would be strangers to each other.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda.h"

#define RUNTIME_VARIABLE "UMBP_HIP_CUDA_RUNTIME"
#define DRIVER "libcuda.so.1"

static const char *const runtime_names[] = {"libcudart.so.13", "libcudart.so.12"};
enum { RUNTIME_NAME_COUNT = sizeof(runtime_names) / sizeof(runtime_names[0]) };

cuda_calls cuda;

static bool is_loaded;
static atomic_bool is_ending;
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

/* Handles are never closed: whoever frees memory late finds the code still there. */
static void *open_library(const char *name, int more_flags) {
    return dlopen(name, RTLD_NOW | RTLD_LOCAL | more_flags);
}

static void *open_runtime(void) {
    const char *chosen = getenv(RUNTIME_VARIABLE);
    if (chosen != NULL && chosen[0] != '\0') {
        void *library = open_library(chosen, 0);
        if (library == NULL) {
            fprintf(stderr, "hip_cuda: " RUNTIME_VARIABLE "=%s cannot be loaded: %s\n", chosen,
                    dlerror());
        }
        return library;
    }
    /* What the process has already goes before what it could have. */
    static const int rounds[] = {RTLD_NOLOAD, 0};
    for (size_t round = 0; round < sizeof(rounds) / sizeof(rounds[0]); round++) {
        for (size_t index = 0; index < RUNTIME_NAME_COUNT; index++) {
            void *library = open_library(runtime_names[index], rounds[round]);
            if (library != NULL) {
                return library;
            }
        }
    }
    fprintf(stderr, "hip_cuda: found neither %s nor %s: name one's folder in LD_LIBRARY_PATH, or "
                    "its path in " RUNTIME_VARIABLE "\n", runtime_names[0], runtime_names[1]);
    return NULL;
}

static void *open_driver(void) {
    void *library = open_library(DRIVER, 0);
    if (library == NULL) {
        fprintf(stderr, "hip_cuda: NVIDIA's driver is not there: %s\n", dlerror());
    }
    return library;
}

/* Writes the address of a function; POSIX lets dlsym's answer be one, ISO C has no cast for it. */
static bool find(void *library, const char *name, void *function) {
    void *address = dlsym(library, name);
    if (address == NULL) {
        fprintf(stderr, "hip_cuda: this CUDA has no %s: versions 12 and 13 have\n", name);
        return false;
    }
    *(void **)function = address;
    return true;
}

static bool find_all(void *runtime, void *driver) {
    bool found = find(runtime, "cudaGetErrorString", &cuda.cudaGetErrorString);
#define FIND_IN(library, name) found = find(library, #name, &cuda.name) && found;
#define FIND_IN_RUNTIME(name, parameters) FIND_IN(runtime, name)
#define FIND_IN_DRIVER(name, parameters) FIND_IN(driver, name)
    CUDA_RUNTIME_CALLS(FIND_IN_RUNTIME)
    CUDA_DRIVER_CALLS(FIND_IN_DRIVER)
    return found;
}

static void note_end(void) { atomic_store(&is_ending, true); }

static void load(void) {
    void *runtime = open_runtime();
    void *driver = runtime == NULL ? NULL : open_driver();
    if (driver == NULL || !find_all(runtime, driver)) {
        return;
    }
    int status = cuda.cuInit(0);
    if (status != 0) {
        fprintf(stderr, "hip_cuda: NVIDIA's driver does not start: error %d\n", status);
        return;
    }
    /* Such functions run last registered first: this one before CUDA puts itself away, which it
     * has asked for when it was loaded. */
    is_loaded = atexit(note_end) == 0;
}

hip_error cuda_ready(void) {
    if (atomic_load(&is_ending)) {
        return HIP_ERROR_DEINITIALIZED;
    }
    pthread_once(&load_once, load);
    return is_loaded ? HIP_SUCCESS : HIP_ERROR_NO_DEVICE;
}
