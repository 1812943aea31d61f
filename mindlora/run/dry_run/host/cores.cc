// Loaded before everything else: 64 cores. The backend plans by the host's cores, of which a host of NPUs has many;
// with two it cannot build a graph that holds an `if` on a tensor ("Can not build a sub graph which contains
// ConditionSwitch"). Threads beyond the real cores take turns.
#include <dlfcn.h>
#include <unistd.h>

#include <thread>

namespace {
constexpr int kCores = 64;
}

unsigned std::thread::hardware_concurrency() noexcept { return kCores; }

extern "C" {

int get_nprocs() { return kCores; }
int get_nprocs_conf() { return kCores; }

long sysconf(int name)
{
    static const auto real = reinterpret_cast<long (*)(int)>(dlsym(RTLD_NEXT, "sysconf"));
    return name == _SC_NPROCESSORS_ONLN || name == _SC_NPROCESSORS_CONF ? kCores : real(name);
}
}
