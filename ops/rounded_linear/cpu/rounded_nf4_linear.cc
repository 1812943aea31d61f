// rounded_linear on a CPU with W in 4-bit NormalFloat. See ../README.md.
#include <omp.h>

#include <atomic>
#include <thread>
#include <tuple>

#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "nf4_linear/cpu/nf4_weight.h"
#include "rounded_linear/cpu/product_inputs.h"
#define MINDLORA_KERNEL_HAS_DOTS
#define MINDLORA_KERNEL "rounded_linear/cpu/rounded_nf4_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "rounded_linear";

template <int kProducts>
using Inputs = ProductInputs<kProducts, 4>;

// Returns the shapes of the outputs.
template <int kProducts>
std::vector<std::vector<int64_t>> Infer(int* ndims, int64_t** shapes)
{
    using In = Inputs<kProducts>;
    const Shapes s(kOp, ndims, shapes);
    std::vector<std::vector<int64_t>> outputs;
    for (int i = 0; i < kProducts; ++i) {
        CheckNf4Weight(s, In::Weight(i), s.Width(In::kX));
        CheckAdapters(s, In::Pool(i), In::kIndices, s.Width(In::kX), s.At(In::Weight(i), 0));
        outputs.push_back(s.OfWithLast(In::kX, s.At(In::Weight(i), 0)));
    }
    return outputs;
}

template <int kProducts>
int Run(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes)
{
    using In = Inputs<kProducts>;
    const Shapes s(kOp, ndims, shapes);
    Infer<kProducts>(ndims, shapes);
    CheckDtype(kOp, "x", dtypes[In::kX], "float32");
    for (int i = 0; i < kProducts; ++i) {
        CheckNf4Dtypes(kOp, dtypes, In::Weight(i));
        CheckAdapterDtypes(kOp, dtypes, In::Pool(i), In::kIndices);
        CheckDtype(kOp, "pool", dtypes[In::Pool(i)], dtypes[In::Pool(0)]);
    }
    const bool has_bias = HasBias(kOp, count, In::kBias, kProducts);
    WithElement(kOp, dtypes[In::Pool(0)], [&](auto adapter) {
        using P = decltype(adapter);
        std::vector<Product<Nf4, float, P>> products;
        for (int i = 0; i < kProducts; ++i) {
            const int64_t out = s.At(In::Weight(i), 0);
            const void* bias = has_bias ? BiasAt(kOp, s, In::kBias + i, data, dtypes, out) : nullptr;
            products.push_back({Nf4At(s, data, In::Weight(i)), AdaptersAt<P>(kOp, s, data, In::Pool(i), In::kIndices),
                static_cast<const float*>(bias), out, static_cast<float*>(data[count - kProducts + i])});
        }
        MINDLORA_DISPATCH_DOTS(RoundedNf4Linear, static_cast<const float*>(data[In::kX]), products, s.Tokens(In::kX),
            s.Width(In::kX), omp_get_max_threads());
    });
    return 0;
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT_PRODUCTS(RoundedNf4Linear, 1)
MINDLORA_EXPORT_PRODUCTS(RoundedNf4Linear2, 2)
MINDLORA_EXPORT_PRODUCTS(RoundedNf4Linear3, 3)
