// The sequences of a batch, as the kernel of paged_attention takes them, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu_common/aot.h"

namespace mindlora {

struct AttentionShape {
    int64_t block_size, kv_heads, group, size;  // group: query heads of one kv head; size: D
    float scale;

    // Where in a cache of keys or values the head of position `j` is.
    int64_t Offset(const int32_t* table, int64_t j, int64_t kv_head) const
    {
        return ((table[j / block_size] * block_size + j % block_size) * kv_heads + kv_head) * size;
    }

    // Where in the queries and in the output row `r` of the h-th head of a task is.
    template <class Task>
    int64_t RowAt(const Task& task, int64_t h, int64_t r) const
    {
        const int64_t token = task.sequence->first + task.query + r / group;
        return ((token * kv_heads + task.head + h) * group + r % group) * size;
    }
};

struct Sequence {
    int64_t first, queries, context;  // its first row in the batch, its rows, its keys
    const int32_t* table;             // the blocks of its keys
};

// What a step has of its tokens, row by row: T as the cache, C as the tables.
template <class T, class C>
struct NewTokens {
    const T *query, *key, *value;
    const C *cos, *sin;
};

// Refuses a sequence with wrong lengths or blocks. `place` says which one.
inline void CheckSequence(
    const char* op, const Sequence& s, const std::string& place, int64_t max_blocks, int64_t blocks, int64_t block_size)
{
    const std::string queries = std::to_string(s.queries), context = std::to_string(s.context);
    if (s.queries < 0) Refuse(op, "query_lengths has " + queries + " for " + place + ": it must be 0 or more.");
    if (s.context < s.queries) {
        Refuse(op,
            "context_lengths has " + context + " for " + place + ", which has " + queries +
                " tokens in this step: they are part of the context.");
    }
    if (s.context > max_blocks * block_size) {
        Refuse(op,
            "context_lengths has " + context + " for " + place + ": block_tables has room for " +
                std::to_string(max_blocks * block_size) + ".");
    }
    for (int64_t i = 0; i * block_size < s.context; ++i) {
        if (s.table[i] < 0 || s.table[i] >= blocks) {
            Refuse(op,
                "block_tables has block " + std::to_string(s.table[i]) + " at " + std::to_string(i) + " for " + place +
                    ": the cache has " + std::to_string(blocks) + ".");
        }
    }
}

// Returns the sequences that have rows in this step. Those without are not looked at any further.
inline std::vector<Sequence> Sequences(const char* op, const int32_t* tables, int64_t max_blocks,
    const int32_t* contexts, const int32_t* queries, int64_t count, int64_t blocks, int64_t block_size, int64_t tokens)
{
    std::vector<Sequence> sequences;
    int64_t rows = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Sequence s{rows, queries[i], contexts[i], tables + i * max_blocks};
        if (s.queries == 0) continue;
        CheckSequence(op, s, "sequence " + std::to_string(i), max_blocks, blocks, block_size);
        rows += s.queries;
        sequences.push_back(s);
    }
    if (rows != tokens) {
        Refuse(
            op, "query_lengths sum to " + std::to_string(rows) + ": query has " + std::to_string(tokens) + " tokens.");
    }
    return sequences;
}

// Returns where in a cache of keys or values each row of the sequences goes.
inline std::vector<int64_t> Places(const AttentionShape& a, const std::vector<Sequence>& sequences)
{
    std::vector<int64_t> places;
    for (const Sequence& s : sequences) {
        for (int64_t j = s.context - s.queries; j < s.context; ++j) places.push_back(a.Offset(s.table, j, 0));
    }
    return places;
}

}  // namespace mindlora
