// routed_experts on a CPU: each token through the experts that its router chose. See ../README.md.
#include "routed_experts/cpu/routed_experts.h"

#include <omp.h>

#include <cmath>
#include <utility>

#include "cpu_common/isa.h"

namespace mindlora {

// The matrices of all experts in float, [experts, out, in].
template <class W>
struct DenseExperts {
    static constexpr int64_t kRange = 64;  // outputs of a task
    const W* data;
    int64_t out;
    int64_t in;
};

// The same transposed, [experts * in, out].
template <class W>
struct TransposedExperts {
    static constexpr int64_t kRange = 64;
    const W* data;
    int64_t out;
    int64_t in;
};

}  // namespace mindlora

#define MINDLORA_KERNEL "routed_experts/cpu/dense_experts_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "routed_experts";
enum { kGateUp = 3, kDown, kPools, kY = 12 };

// Whether the weights are those of mcore, of two dimensions.
bool AreTransposed(const Shapes& s) { return s.Rank(kGateUp) == 2; }

// Of transposed weights the rows tell the number of experts, and I.
ExpertSizes SizesOf(const Shapes& s)
{
    const int64_t hidden = s.Width(kX);
    if (!AreTransposed(s)) return {s.At(kGateUp, 0), hidden, s.At(kDown, 2)};
    const int64_t gate_up = s.At(kGateUp, 0), down = s.At(kDown, 0);
    const int64_t experts = hidden > 0 && gate_up >= 0 ? gate_up / hidden : -1;
    return {experts, hidden, experts > 0 && down >= 0 ? down / experts : -1};
}

void CheckTransposed(const Shapes& s)
{
    const auto [experts, hidden, inner] = SizesOf(s);
    s.CheckRank(kDown, "down", 2);
    if (experts >= 0) s.CheckSame("the number of rows of gate_up", s.At(kGateUp, 0), experts * hidden);
    if (inner >= 0) {
        s.CheckSame("the number of rows of down", s.At(kDown, 0), experts * inner);
        s.CheckSame("2 I", s.At(kGateUp, 1), 2 * inner);
    }
    s.CheckSame("H", hidden, s.At(kDown, 1));
}

void CheckDense(const Shapes& s)
{
    s.CheckRank(kGateUp, "gate_up", 3);
    s.CheckRank(kDown, "down", 3);
    s.CheckSame("the number of experts", s.At(kGateUp, 0), s.At(kDown, 0));
    s.CheckSame("H", s.Width(kX), s.At(kGateUp, 2));
    s.CheckSame("H", s.Width(kX), s.At(kDown, 1));
    if (s.At(kDown, 2) >= 0) s.CheckSame("2 I", s.At(kGateUp, 1), 2 * s.At(kDown, 2));
}

void Check(const Shapes& s)
{
    if (AreTransposed(s)) {
        CheckTransposed(s);
    } else {
        CheckDense(s);
    }
    CheckRouted(kOp, s, SizesOf(s), kPools);
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
    CheckRoutedDtypes(kOp, dtypes, kPools);
    CheckDtype(kOp, "down", dtypes[kDown], dtypes[kGateUp]);
    const auto [experts, hidden, inner] = SizesOf(s);
    const std::vector<Pair> work = SortedByExpert(kOp, data, s, experts, kPools);
    const ExpertPairs gate_up_pairs = ExpertPairsAt(kOp, data, s, kPools, experts),
                      down_pairs = ExpertPairsAt(kOp, data, s, kPools + 3, experts);
    const bool transposed = AreTransposed(s);
    WithElement(kOp, dtypes[kGateUp], [&, hidden = hidden, inner = inner](auto weight) {
        using W = decltype(weight);
        const auto run = [&](const auto& gate_up, const auto& down) {
            MINDLORA_DISPATCH(RoutedExperts, static_cast<const float*>(data[kX]),
                static_cast<const float*>(data[kWeights]), gate_up, down, gate_up_pairs, down_pairs, work, s.Tokens(kX),
                s.At(kExperts, 1), hidden, inner, omp_get_max_threads(), static_cast<float*>(data[kY]));
        };
        const auto *gate_up = static_cast<const W*>(data[kGateUp]), *down = static_cast<const W*>(data[kDown]);
        if (transposed) {
            run(TransposedExperts<W>{gate_up, 2 * inner, hidden}, TransposedExperts<W>{down, hidden, inner});
        } else {
            run(DenseExperts<W>{gate_up, 2 * inner, hidden}, DenseExperts<W>{down, hidden, inner});
        }
    });
    return 0;
}
