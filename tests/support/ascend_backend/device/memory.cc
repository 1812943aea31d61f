// Memory, streams and events of the device: memory is mapped as it is asked for, and nothing is ever under way.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

// Some kernels read a whole block where the last element lies.
constexpr size_t kSpare = 4096;
std::mutex lock;
std::unordered_map<void*, size_t> mapped;

int Take(void** memory, size_t bytes)
{
    bytes += kSpare;
    *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*memory == MAP_FAILED) return 1;
    const std::lock_guard<std::mutex> guard(lock);
    mapped[*memory] = bytes;
    return 0;
}

int Give(void* memory)
{
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = mapped.find(memory);
    if (found == mapped.end()) return 0;
    munmap(memory, found->second);
    mapped.erase(found);
    return 0;
}

// Streams, events and other things of which MindSpore only asks that they differ and are not null.
int Make(void** handle)
{
    static uintptr_t last = 0x1000;
    const std::lock_guard<std::mutex> guard(lock);
    *handle = reinterpret_cast<void*>(last += 16);
    return 0;
}

}  // namespace

extern "C" {

int aclrtMalloc(void** memory, size_t bytes, int) { return Take(memory, bytes); }
int aclrtMallocAlign32(void** memory, size_t bytes, int) { return Take(memory, bytes); }
int aclrtMallocHost(void** memory, size_t bytes) { return Take(memory, bytes); }
int aclrtReserveMemAddress(void** memory, size_t bytes, size_t, void*, uint64_t) { return Take(memory, bytes); }
int aclrtFree(void* memory) { return Give(memory); }
int aclrtFreeHost(void* memory) { return Give(memory); }
int aclrtReleaseMemAddress(void* memory) { return Give(memory); }
int aclrtMallocPhysical(void** handle, size_t, const void*, uint64_t) { return Make(handle); }

int aclrtMemcpy(void* target, size_t, const void* source, size_t bytes, int)
{
    std::memcpy(target, source, bytes);
    return 0;
}

int aclrtMemcpyAsync(void* target, size_t, const void* source, size_t bytes, int, void*)
{
    std::memcpy(target, source, bytes);
    return 0;
}

int aclrtMemset(void* target, size_t, int value, size_t bytes)
{
    std::memset(target, value, bytes);
    return 0;
}

int aclrtMemsetAsync(void* target, size_t, int value, size_t bytes, void*)
{
    std::memset(target, value, bytes);
    return 0;
}

int aclrtCreateStream(void** stream) { return Make(stream); }
int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) { return Make(stream); }
int aclrtCreateContext(void** context, int) { return Make(context); }
int aclrtCreateEvent(void** event) { return Make(event); }
int aclrtCreateEventExWithFlag(void** event, uint32_t) { return Make(event); }
int aclrtCreateEventWithFlag(void** event, uint32_t) { return Make(event); }
int rtDevBinaryRegister(const void*, void** handle) { return Make(handle); }
int rtRegisterAllKernel(const void*, void** handle) { return Make(handle); }

int aclrtGetCurrentContext(void** context)
{
    static void* const only = [] {
        void* made = nullptr;
        Make(&made);
        return made;
    }();
    *context = only;
    return 0;
}

int aclrtQueryEventStatus(void*, int* status)
{
    *status = 1;  // it has happened
    return 0;
}

int aclrtStreamQuery(void*, int* status)
{
    *status = 0;  // nothing is left to do
    return 0;
}

int aclrtGetRunMode(int* mode)
{
    *mode = 1;  // the host beside the device
    return 0;
}

int aclrtProcessReport(int)
{
    usleep(20000);  // MindSpore asks in a loop for reports of callbacks, and there are none.
    return 0;
}
}
