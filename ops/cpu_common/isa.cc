#include "cpu_common/isa.h"

#include <atomic>

namespace mindlora {

namespace {
std::atomic<int> chosen{-1};
}  // namespace

Isa BestIsa()
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
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

extern "C" int mindlora_library_version() { return 14; }
