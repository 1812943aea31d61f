// Which tokens of a batch have an adapter in a pool, in the order in which they share it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu_common/aot.h"

namespace mindlora {

// Returns the rows that have an adapter, sorted by it; rows of one adapter keep their order.
inline std::vector<int64_t> SortedBySlot(
    const char* op, const int32_t* indices, const int32_t* ranks, int64_t tokens, int64_t slots, int64_t max_rank)
{
    std::vector<int64_t> order;
    for (int64_t t = 0; t < tokens; ++t) {
        if (indices[t] >= slots) {
            Refuse(op,
                "row " + std::to_string(t) + " asks for slot " + std::to_string(indices[t]) + " of " +
                    std::to_string(slots) + ".");
        }
        if (indices[t] < 0) continue;
        const int32_t rank = ranks[indices[t]];
        if (rank < 0 || rank > max_rank) {
            Refuse(op,
                "rank " + std::to_string(rank) + " of slot " + std::to_string(indices[t]) + " is not 0 to " +
                    std::to_string(max_rank) + ".");
        }
        if (rank > 0) order.push_back(t);
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t s, int64_t t) { return indices[s] < indices[t]; });
    return order;
}

}  // namespace mindlora
