#include "cpu_common/isa.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mindlora {

namespace {
std::atomic<int> chosen{-1};

#if MINDLORA_HAS_AMX
// Whether the processor multiplies tiles of bfloat16, and Linux lets this process hold tiles, for which it must ask.
bool HasTiles()
{
    constexpr unsigned kTile = 1u << 24, kBfloat16 = 1u << 22;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kTile) || !(d & kBfloat16)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
}  // namespace

Isa BestIsa()
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if MINDLORA_HAS_AMX
    if (avx2 && avx512 && __builtin_cpu_supports("avx512bf16") && HasTiles()) return kAmxBf16;
#endif
    if (avx2 && avx512) return __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx512;
    if (avx2) return kAvx2;
#endif
    return kPlain;
}

Isa CurrentIsa()
{
    static const Isa best = BestIsa();
    const int isa = chosen.load(std::memory_order_relaxed);
    return isa < 0 || isa > best ? best : static_cast<Isa>(isa);
}

}  // namespace mindlora

extern "C" int mindlora_set_isa(int isa)
{
    mindlora::chosen.store(isa, std::memory_order_relaxed);
    return mindlora::CurrentIsa();
}

extern "C" int mindlora_best_isa() { return mindlora::BestIsa(); }

extern "C" int mindlora_library_version() { return 16; }
