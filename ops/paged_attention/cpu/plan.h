// The work of a batch, cut into tasks for threads. Results do not depend on how it is cut.
#pragma once

#include <algorithm>

#include "paged_attention/cpu/sequences.h"

namespace mindlora {

// The keys of a sequence are summed in pieces of this many, counted from position 0, which are then added up in order:
// so the pieces of one long context can be work for several threads.
constexpr int64_t kPiece = 512;
// Up to this many rows of a head are few: they read keys and values as they lie.
constexpr int64_t kFewRows = 16;
// More rows are cut into tasks of this many, which share one copy of the keys and values.
constexpr int64_t kTaskRows = 192;
constexpr int64_t kTasksPerThread = 4;

struct AttentionTask {
    const Sequence* sequence;
    int64_t query, queries, head, heads, piece, pieces;  // of the sequence; pieces [piece, pieces)
    int64_t part;                                        // the first row of its sums in the parts; -1: it has all keys
    int64_t cost;
};

struct AttentionPlan {
    std::vector<AttentionTask> tasks, joins;  // joins: the sequences whose pieces are added up in the end
    int64_t parts = 0;                        // rows of sums of pieces
};

inline int64_t Pieces(int64_t keys) { return (keys + kPiece - 1) / kPiece; }

// A task for each head and each kTaskRows rows.
inline void PlanManyRows(const AttentionShape& a, const Sequence& s, AttentionPlan* plan)
{
    const int64_t step = std::max<int64_t>(1, kTaskRows / a.group);
    for (int64_t query = 0; query < s.queries; query += step) {
        const int64_t queries = std::min(step, s.queries - query), keys = s.context - s.queries + query + queries;
        for (int64_t head = 0; head < a.kv_heads; ++head) {
            plan->tasks.push_back({&s, query, queries, head, 1, 0, Pieces(keys), -1, keys * queries * a.group});
        }
    }
}

// A task for each piece of the keys and as many heads as there are heads times keys in `share`.
inline void PlanFewRows(const AttentionShape& a, const Sequence& s, int64_t share, AttentionPlan* plan)
{
    const int64_t rows = s.queries * a.group, pieces = Pieces(s.context);
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t keys = std::min(kPiece, s.context - piece * kPiece);
        const int64_t step = std::max<int64_t>(1, std::min(a.kv_heads, share / keys));
        for (int64_t head = 0; head < a.kv_heads; head += step) {
            const int64_t heads = std::min(step, a.kv_heads - head);
            const int64_t part = pieces == 1 ? -1 : plan->parts + (piece * a.kv_heads + head) * rows;
            // Reading a key costs about as much as eight rows of sums.
            plan->tasks.push_back({&s, 0, s.queries, head, heads, piece, piece + 1, part, keys * heads * (rows + 8)});
        }
    }
    if (pieces == 1) return;
    plan->joins.push_back({&s, 0, s.queries, 0, a.kv_heads, 0, pieces, plan->parts, 0});
    plan->parts += pieces * a.kv_heads * rows;
}

inline AttentionPlan MakePlan(const AttentionShape& a, const std::vector<Sequence>& sequences, int threads)
{
    AttentionPlan plan;
    int64_t keys = 0;
    for (const Sequence& s : sequences) keys += s.queries * a.group <= kFewRows ? s.context : 0;
    for (const Sequence& s : sequences) {
        if (s.queries * a.group <= kFewRows) {
            PlanFewRows(a, s, keys * a.kv_heads / (kTasksPerThread * threads), &plan);
        } else {
            PlanManyRows(a, s, &plan);
        }
    }
    // The longest first, so that no thread is left alone with one in the end.
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
        [](const AttentionTask& first, const AttentionTask& second) { return first.cost > second.cost; });
    return plan;
}

}  // namespace mindlora
