/* A double of NVIDIA's driver, with the functions that CUDA IPC takes. The memory of its GPUs is memory that processes of
   this host share, so that they can map each other's; calls without a context fail, as the driver's do. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS, INVALID_VALUE, NO_CONTEXT = 201, DEVICES = 3, MOST = 256 };

typedef struct { char bytes[64]; } handle;
typedef struct { uint64_t magic; int64_t process, file; uint64_t size; } content;
typedef struct { char *base; size_t size; int file; } allocation;

static const uint64_t MAGIC = 0x6163756461697063;
static allocation made[MOST], mapped[MOST];
static __thread int contexts;

int fake_peers = 1;      /* whether GPUs reach each other */
int fake_expandable = 0; /* whether allocations have no handles */

static allocation *find(allocation *among, uint64_t at)
{
    for (int i = 0; i < MOST; i++)
        if (among[i].base && (uint64_t)among[i].base <= at && at < (uint64_t)among[i].base + among[i].size)
            return &among[i];
    return NULL;
}

static uint64_t add(allocation *among, int file, size_t size)
{
    char *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    for (int i = 0; base != MAP_FAILED && i < MOST; i++)
        if (!among[i].base) {
            among[i] = (allocation){base, size, file};
            return (uint64_t)base;
        }
    return 0;
}

uint64_t fake_allocate(size_t size)
{
    int file = memfd_create("gpu", 0);
    return file < 0 || ftruncate(file, size) ? 0 : add(made, file, size);
}

void fake_free(uint64_t at)
{
    allocation *found = find(made, at);
    munmap(found->base, found->size);
    close(found->file);
    found->base = NULL;
}

int fake_mappings(void)
{
    int count = 0;
    for (int i = 0; i < MOST; i++)
        count += mapped[i].base != NULL;
    return count;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

int cuGetErrorName(int status, const char **name)
{
    *name = status == NO_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_INVALID_VALUE";
    return SUCCESS;
}

int cuDeviceGet(int *device, int number)
{
    *device = 100 + number; /* a device is no number */
    return number < DEVICES ? SUCCESS : INVALID_VALUE;
}

int cuDeviceGetCount(int *count) { return *count = DEVICES, SUCCESS; }

int cuDeviceGetUuid_v2(char *uuid, int device)
{
    memset(uuid, 0, 16);
    uuid[15] = (char)(device - 100);
    return SUCCESS;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = fake_peers && device != peer;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(intptr_t)device, SUCCESS; }

int cuCtxPushCurrent_v2(void *context) { return contexts++, context ? SUCCESS : INVALID_VALUE; }

int cuCtxPopCurrent_v2(void **context) { return contexts--, *context = NULL, SUCCESS; }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t at)
{
    allocation *found = find(made, at);
    if (!contexts)
        return NO_CONTEXT;
    if (!found)
        return INVALID_VALUE;
    *base = (uint64_t)found->base;
    *size = found->size;
    return SUCCESS;
}

int cuIpcGetMemHandle(handle *named, uint64_t at)
{
    allocation *found = find(made, at);
    if (!contexts)
        return NO_CONTEXT;
    if (!found || fake_expandable)
        return INVALID_VALUE;
    content inside = {MAGIC, getpid(), found->file, found->size};
    memset(named, 0, sizeof *named);
    memcpy(named, &inside, sizeof inside);
    return SUCCESS;
}

int cuIpcOpenMemHandle_v2(uint64_t *at, handle named, unsigned flags)
{
    content inside;
    char path[64];
    memcpy(&inside, &named, sizeof inside);
    if (!contexts)
        return NO_CONTEXT;
    if (inside.magic != MAGIC || flags != 1)
        return INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%ld/fd/%ld", (long)inside.process, (long)inside.file);
    int file = open(path, O_RDWR);
    if (file < 0)
        return INVALID_VALUE;
    *at = add(mapped, file, inside.size);
    close(file);
    return *at ? SUCCESS : INVALID_VALUE;
}

int cuIpcCloseMemHandle(uint64_t at)
{
    allocation *found = find(mapped, at);
    if (!contexts)
        return NO_CONTEXT;
    if (!found || (uint64_t)found->base != at)
        return INVALID_VALUE;
    munmap(found->base, found->size);
    found->base = NULL;
    return SUCCESS;
}
