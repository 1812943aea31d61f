// routed_experts on a CPU: each token through the experts that its router chose. See ../README.md.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"

namespace mindlora {

// What is computed for a token by one of its experts: choice number `at` of all tokens' choices.
struct Pair {
    int64_t at;
    int32_t expert;
    int32_t slot;  // -1 without an adapter
};

// The adapters on one stacked weight. The first ranks[slot] rows of a slot are its experts' pairs, one after the other.
struct ExpertPairs {
    const float* pool;
    const int32_t* ranks;
    const float* scales;
    int64_t slot_rows;
    int64_t width;
    int64_t experts;
    int64_t max_rank;

    // Both of a token with an adapter.
    int64_t Rank(const Pair& pair) const { return ranks[pair.slot] / experts; }
    const float* Rows(const Pair& pair) const
    {
        return pool + (pair.slot * slot_rows + pair.expert * Rank(pair)) * width;
    }
};

}  // namespace mindlora

#define MINDLORA_KERNEL "routed_experts/cpu/routed_experts_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "routed_experts";
enum {
    kX,
    kExperts,
    kWeights,
    kGateUp,
    kDown,
    kGateUpPool,
    kGateUpRanks,
    kGateUpScales,
    kDownPool,
    kDownRanks,
    kDownScales,
    kSlots,
    kY
};

// The pool at input `pool` of pairs on the weight at input `weight`, [experts, out, in].
void CheckPairs(const Shapes& s, int pool, int weight)
{
    s.CheckSlots(pool, pool + 1, pool + 2);
    const int64_t experts = s.At(weight, 0), rows = s.At(pool, 1);
    if (s.At(weight, 1) >= 0 && s.At(weight, 2) >= 0) {
        s.CheckSame("K + N", s.At(weight, 1) + s.At(weight, 2), s.At(pool, 2));
    }
    if (experts < 0 || rows < 0) return;
    if (rows % experts) {
        Refuse(kOp,
            "a slot has " + std::to_string(rows) + " rows, which is not a number for each of " +
                std::to_string(experts) + " experts.");
    }
    s.CheckLoraRank(rows / experts);
}

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
    CheckPairs(s, kGateUpPool, kGateUp);
    CheckPairs(s, kDownPool, kDown);
    s.CheckSame("the number of slots", s.At(kGateUpPool, 0), s.At(kDownPool, 0));
    s.CheckRank(kSlots, "slots", 1);
    s.CheckEnough(kSlots, "slots", s.Tokens(kX));
}

ExpertPairs PairsAt(void** data, const Shapes& s, int pool, int weight)
{
    const int64_t experts = s.At(weight, 0), rows = s.At(pool, 1);
    const ExpertPairs pairs = {static_cast<const float*>(data[pool]), static_cast<const int32_t*>(data[pool + 1]),
        static_cast<const float*>(data[pool + 2]), rows, s.At(pool, 2), experts, rows / experts};
    for (int64_t slot = 0; slot < s.At(pool, 0); ++slot) {
        const int32_t used = pairs.ranks[slot];
        // Fewer rows than experts are those of an adapter without pairs here.
        if (used < 0 || used > rows || (used > experts && used % experts)) {
            Refuse(kOp,
                "slot " + std::to_string(slot) + " has " + std::to_string(used) + " rows of pairs for " +
                    std::to_string(experts) + " experts, and room for " + std::to_string(rows) + ".");
        }
    }
    return pairs;
}

[[noreturn]] void RefuseRow(int64_t row, const char* what, int32_t number, int64_t count)
{
    Refuse(kOp,
        "row " + std::to_string(row) + " asks for " + what + " " + std::to_string(number) + " of " +
            std::to_string(count) + ".");
}

// The work of each token and each of its experts, those of one expert together.
std::vector<Pair> SortedByExpert(const int32_t* chosen, const int32_t* slots, const Shapes& s)
{
    const int64_t each = s.At(kExperts, 1), experts = s.At(kDown, 0), slot_count = s.At(kGateUpPool, 0);
    std::vector<Pair> work;
    for (int64_t at = 0; at < s.Tokens(kX) * each; ++at) {
        const int32_t expert = chosen[at], slot = slots[at / each];
        if (expert < 0 || expert >= experts) RefuseRow(at / each, "expert", expert, experts);
        if (slot >= slot_count) RefuseRow(at / each, "slot", slot, slot_count);
        work.push_back({at, expert, slot});
    }
    std::stable_sort(work.begin(), work.end(), [](const Pair& i, const Pair& j) { return i.expert < j.expert; });
    return work;
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
    for (const int pool : {kGateUpPool, kDownPool}) {
        CheckDtype(kOp, "a pool", dtypes[pool], "float32");
        CheckDtype(kOp, "ranks", dtypes[pool + 1], "int32");
        CheckDtype(kOp, "scales", dtypes[pool + 2], "float32");
    }
    CheckDtype(kOp, "slots", dtypes[kSlots], "int32");
    const std::vector<Pair> work =
        SortedByExpert(static_cast<const int32_t*>(data[kExperts]), static_cast<const int32_t*>(data[kSlots]), s);
    const ExpertPairs gate_up_pairs = PairsAt(data, s, kGateUpPool, kGateUp),
                      down_pairs = PairsAt(data, s, kDownPool, kDown);
    WithElement(kOp, dtypes[kGateUp], [&](auto weight) {
        using W = decltype(weight);
        MINDLORA_DISPATCH(RoutedExperts, static_cast<const float*>(data[kX]), static_cast<const float*>(data[kWeights]),
            static_cast<const W*>(data[kGateUp]), static_cast<const W*>(data[kDown]), gate_up_pairs, down_pairs, work,
            s.Tokens(kX), s.At(kExperts, 1), s.Width(kX), s.At(kDown, 2), omp_get_max_threads(),
            static_cast<float*>(data[kY]));
    });
    return 0;
}
