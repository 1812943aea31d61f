// rounded_linear on a CPU with W in 4-bit NormalFloat. See ../README.md.
#include <atomic>
#include <thread>
#include <tuple>

#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "nf4_linear/cpu/nf4_weight.h"
#include "rounded_linear/cpu/rounded_products.h"
#define MINDLORA_KERNEL_HAS_DOTS
#define MINDLORA_KERNEL "rounded_linear/cpu/rounded_nf4_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

struct InNf4 {
    using Weight = Nf4;
    static constexpr int kTensors = 4;

    static void Check(const Shapes& s, int codes, int64_t in) { CheckNf4Weight(s, codes, in); }

    static void CheckDtypes(const char** dtypes, int codes) { CheckNf4Dtypes(kRoundedLinear, dtypes, codes); }

    static Weight At(const Shapes& s, void** data, int codes) { return Nf4At(s, data, codes); }

    template <class Products>
    static void Call(const float* x, const Products& products, int64_t tokens, int64_t in, int threads)
    {
        MINDLORA_DISPATCH_DOTS(RoundedNf4Linear, x, products, tokens, in, threads);
    }
};

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT_PRODUCTS(RoundedNf4Linear, ::mindlora::InNf4, 1)
MINDLORA_EXPORT_PRODUCTS(RoundedNf4Linear2, ::mindlora::InNf4, 2)
MINDLORA_EXPORT_PRODUCTS(RoundedNf4Linear3, ::mindlora::InNf4, 3)
