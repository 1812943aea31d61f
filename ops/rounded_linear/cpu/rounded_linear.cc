// rounded_linear on a CPU with W in bfloat16. See ../README.md.
#include <atomic>
#include <thread>
#include <tuple>

#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "rounded_linear/cpu/rounded_products.h"
#define MINDLORA_KERNEL_HAS_DOTS
#define MINDLORA_KERNEL "rounded_linear/cpu/rounded_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

struct InBfloat16 {
    using Weight = const bfloat16*;
    static constexpr int kTensors = 1;

    static void Check(const Shapes& s, int w, int64_t in)
    {
        s.CheckRank(w, "W", 2);
        s.CheckSame("K", in, s.At(w, 1));
    }

    static void CheckDtypes(const char** dtypes, int w) { CheckDtype(kRoundedLinear, "W", dtypes[w], "bfloat16"); }

    static Weight At(const Shapes&, void** data, int w) { return static_cast<Weight>(data[w]); }

    template <class Products>
    static void Call(const float* x, const Products& products, int64_t tokens, int64_t in, int threads)
    {
        MINDLORA_DISPATCH_DOTS(RoundedLinear, x, products, tokens, in, threads);
    }
};

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT_PRODUCTS(RoundedLinear, ::mindlora::InBfloat16, 1)
MINDLORA_EXPORT_PRODUCTS(RoundedLinear2, ::mindlora::InBfloat16, 2)
MINDLORA_EXPORT_PRODUCTS(RoundedLinear3, ::mindlora::InBfloat16, 3)
