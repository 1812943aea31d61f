// routed_experts on a CPU: each token through the experts that its router chose. See ../README.md.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#define MINDLORA_KERNEL "routed_experts/cpu/routed_experts_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "routed_experts";
enum { kX, kExperts, kWeights, kGateUp, kDown, kY };

void Check(const Shapes& s)
{
    s.CheckRank(kExperts, "experts", 2);
    s.CheckRank(kWeights, "weights", 2);
    s.CheckRank(kGateUp, "gate_up", 3);
    s.CheckRank(kDown, "down", 3);
    s.CheckSame("the number of tokens", s.Tokens(kX), s.At(kExperts, 0));
    s.CheckSame("the number of tokens", s.Tokens(kX), s.At(kWeights, 0));
    s.CheckSame("the number of experts of a token", s.At(kExperts, 1), s.At(kWeights, 1));
    s.CheckSame("the number of experts", s.At(kGateUp, 0), s.At(kDown, 0));
    s.CheckSame("H", s.Width(kX), s.At(kGateUp, 2));
    s.CheckSame("H", s.Width(kX), s.At(kDown, 1));
    if (s.At(kDown, 2) >= 0) s.CheckSame("2 I", s.At(kGateUp, 1), 2 * s.At(kDown, 2));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> RoutedExpertsInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.Of(mindlora::kX);
}

MINDLORA_EXPORT int RoutedExpertsInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int RoutedExperts(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtype(kOp, "x", dtypes[kX], "float32");
    CheckDtype(kOp, "experts", dtypes[kExperts], "int32");
    CheckDtype(kOp, "weights", dtypes[kWeights], "float32");
    CheckDtype(kOp, "down", dtypes[kDown], dtypes[kGateUp]);
    const int64_t tokens = s.Tokens(kX), each = s.At(kExperts, 1);
    const auto* experts = static_cast<const int32_t*>(data[kExperts]);
    for (int64_t pair = 0; pair < tokens * each; ++pair) {
        if (experts[pair] < 0 || experts[pair] >= s.At(kDown, 0)) {
            Refuse(kOp,
                "row " + std::to_string(pair / each) + " asks for expert " + std::to_string(experts[pair]) + " of " +
                    std::to_string(s.At(kDown, 0)) + ".");
        }
    }
    std::vector<int64_t> order(tokens * each);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return experts[i] < experts[j]; });
    WithElement(kOp, dtypes[kGateUp], [&](auto weight) {
        using W = decltype(weight);
        MINDLORA_DISPATCH(RoutedExperts, static_cast<const float*>(data[kX]), experts,
            static_cast<const float*>(data[kWeights]), static_cast<const W*>(data[kGateUp]),
            static_cast<const W*>(data[kDown]), order, tokens, each, s.Width(kX), s.At(kDown, 2), omp_get_max_threads(),
            static_cast<float*>(data[kY]));
    });
    return 0;
}
