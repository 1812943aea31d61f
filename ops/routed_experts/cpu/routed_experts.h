// What the kernels of routed experts share, whatever weights are held in: shapes, adapters, the order of the work.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cpu_common/aot.h"

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

// Where the inputs are that do not depend on what the weights are held in.
enum { kX, kExperts, kWeights };

// Of the experts: their number, the width of the model and that of each expert; -1 where it is not known.
struct ExpertSizes {
    int64_t experts;
    int64_t hidden;
    int64_t inner;
};

// The pool at input `pool` of pairs on a weight of so many inputs and outputs together.
inline void CheckExpertPairs(const char* op, const Shapes& s, int pool, int64_t experts, int64_t width)
{
    s.CheckSlots(pool, pool + 1, pool + 2);
    const int64_t rows = s.At(pool, 1);
    s.CheckSame("K + N", width, s.At(pool, 2));
    if (experts < 0 || rows < 0) return;
    if (rows % experts) {
        Refuse(op,
            "a slot has " + std::to_string(rows) + " rows, which is not a number for each of " +
                std::to_string(experts) + " experts.");
    }
    s.CheckLoraRank(rows / experts);
}

// All inputs but the weights: the first ones, then, from `pools` on, both pools with ranks and scales, and slots.
inline void CheckRouted(const char* op, const Shapes& s, const ExpertSizes& sizes, int pools)
{
    const auto [experts, hidden, inner] = sizes;
    s.CheckRank(kExperts, "experts", 2);
    s.CheckRank(kWeights, "weights", 2);
    s.CheckSame("the number of tokens", s.Tokens(kX), s.At(kExperts, 0));
    s.CheckSame("the number of tokens", s.Tokens(kX), s.At(kWeights, 0));
    s.CheckSame("the number of experts of a token", s.At(kExperts, 1), s.At(kWeights, 1));
    const bool known = hidden >= 0 && inner >= 0;
    CheckExpertPairs(op, s, pools, experts, known ? hidden + 2 * inner : -1);
    CheckExpertPairs(op, s, pools + 3, experts, known ? hidden + inner : -1);
    s.CheckSame("the number of slots", s.At(pools, 0), s.At(pools + 3, 0));
    s.CheckRank(pools + 6, "slots", 1);
    s.CheckEnough(pools + 6, "slots", s.Tokens(kX));
}

inline void CheckRoutedDtypes(const char* op, const char** dtypes, int pools)
{
    CheckDtype(op, "x", dtypes[kX], "float32");
    CheckDtype(op, "experts", dtypes[kExperts], "int32");
    CheckDtype(op, "weights", dtypes[kWeights], "float32");
    for (const int pool : {pools, pools + 3}) {
        CheckDtype(op, "a pool", dtypes[pool], "float32");
        CheckDtype(op, "ranks", dtypes[pool + 1], "int32");
        CheckDtype(op, "scales", dtypes[pool + 2], "float32");
    }
    CheckDtype(op, "slots", dtypes[pools + 6], "int32");
}

inline ExpertPairs ExpertPairsAt(const char* op, void** data, const Shapes& s, int pool, int64_t experts)
{
    const int64_t rows = s.At(pool, 1);
    const ExpertPairs pairs = {static_cast<const float*>(data[pool]), static_cast<const int32_t*>(data[pool + 1]),
        static_cast<const float*>(data[pool + 2]), rows, s.At(pool, 2), experts, rows / experts};
    for (int64_t slot = 0; slot < s.At(pool, 0); ++slot) {
        const int32_t used = pairs.ranks[slot];
        // Fewer rows than experts are those of an adapter without pairs here.
        if (used < 0 || used > rows || (used > experts && used % experts)) {
            Refuse(op,
                "slot " + std::to_string(slot) + " has " + std::to_string(used) + " rows of pairs for " +
                    std::to_string(experts) + " experts, and room for " + std::to_string(rows) + ".");
        }
    }
    return pairs;
}

[[noreturn]] inline void RefuseRow(const char* op, int64_t row, const char* what, int32_t number, int64_t count)
{
    Refuse(op,
        "row " + std::to_string(row) + " asks for " + what + " " + std::to_string(number) + " of " +
            std::to_string(count) + ".");
}

// The work of each token and each of its experts, those of one expert together.
inline std::vector<Pair> SortedByExpert(const char* op, void** data, const Shapes& s, int64_t experts, int pools)
{
    const int32_t *chosen = static_cast<const int32_t*>(data[kExperts]),
                  *slots = static_cast<const int32_t*>(data[pools + 6]);
    const int64_t each = s.At(kExperts, 1), slot_count = s.At(pools, 0);
    std::vector<Pair> work;
    for (int64_t at = 0; at < s.Tokens(kX) * each; ++at) {
        const int32_t expert = chosen[at], slot = slots[at / each];
        if (expert < 0 || expert >= experts) RefuseRow(op, at / each, "expert", expert, experts);
        if (slot >= slot_count) RefuseRow(op, at / each, "slot", slot, slot_count);
        work.push_back({at, expert, slot});
    }
    std::stable_sort(work.begin(), work.end(), [](const Pair& i, const Pair& j) { return i.expert < j.expert; });
    return work;
}

}  // namespace mindlora
