// The kernel of paged_attention. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "paged_attention/cpu/attention_tile.h"
#include "paged_attention/cpu/take_tokens.h"

// The rows of a task: `count` for each of its heads, those of one query together.
struct Rows {
    int64_t heads, count, size;
    int64_t pitch;         // the floats that are kept of a row: see Weigh
    int64_t group, limit;  // the rows of a query, and the keys that the first query sees

    MINDLORA_MEMBER int64_t Sees(int64_t r) const { return limit + r / group; }
};

// The memory of a thread.
struct Workspace {
    float *q, *state, *total, *kt, *values, *scores;
};

#include "paged_attention/cpu/few_rows.h"
#include "paged_attention/cpu/many_rows.h"

MINDLORA_INLINE Workspace MakeWorkspace(const Rows& rows)
{
    static thread_local std::vector<float> buffer;
    const int64_t count = rows.heads * rows.count, step = Rounded(rows.size, 16),
                  state = Rounded(count * rows.pitch, 16);
    const int64_t needed = count * (step + kKeys) + 2 * state + 2 * kKeys * step;
    Workspace w;
    w.q = Scratch(&buffer, needed);
    w.state = w.q + count * step;
    w.total = w.state + state;
    w.kt = w.total + state;
    w.values = w.kt + kKeys * step;
    w.scores = w.values + kKeys * step;
    return w;
}

// q[d * M + m] = x[m][d] * scale for the M rows of each register tile.
template <class T>
static void PackQueries(const AttentionShape& a, const AttentionTask& task, const Rows& rows, const T* query, float* q)
{
    for (int64_t h = 0; h < rows.heads; ++h) {
        for (int64_t r = 0; r < rows.count;) {
            WithTileRows(rows.count - r, [&](auto constant) {
                constexpr int M = decltype(constant)::value;
                float* tile = q + (h * rows.count + r) * a.size;
                for (int m = 0; m < M; ++m) {
                    const T* row = query + a.RowAt(task, h, r + m);
                    for (int64_t d = 0; d < a.size; ++d) tile[d * M + m] = ToFloat(row[d]) * a.scale;
                }
                r += M;
            });
        }
    }
}

// What the rows of a task know of one piece of their keys.
template <class T>
static void OnePiece(const AttentionShape& a, const AttentionTask& task, const Rows& rows, int64_t piece, const T* keys,
    const T* values, const Workspace& w)
{
    for (int64_t r = 0; r < rows.heads * rows.count; ++r) {
        std::fill_n(w.state + r * rows.pitch, rows.pitch, 0.0f);
        w.state[r * rows.pitch + rows.pitch - 2] = -INFINITY;
    }
    const int64_t begin = piece * kPiece, end = std::min(begin + kPiece, rows.Sees(rows.count - 1));
    int64_t places[kPiece];
    for (int64_t j = begin; j < end; ++j) places[j - begin] = a.Offset(task.sequence->table, j, task.head);
    if (rows.count <= kFewRows) {
        FewRows(rows, keys, values, begin, end, places, w);
    } else {
        ManyRows(rows, keys, values, begin, end, places, w);
    }
}

// Adds what is known of a row from one piece to what is known from those before it. One function for all, so that the
// compiler cannot round it in two ways.
static __attribute__((noinline, noclone)) void Merge(const float* piece, int64_t pitch, float* row)
{
    const int64_t most = pitch - 2, total = pitch - 1;
    if (piece[total] == 0) return;
    const float largest = std::max(row[most], piece[most]);
    const Vec row_factor = Exp(Splat(row[most] - largest)), piece_factor = Exp(Splat(piece[most] - largest));
    for (int64_t d = 0; d < pitch; d += kWidth) {
        const Vec part = Load(piece + d) * piece_factor;
        Store(Load(row + d) * row_factor + part, row + d);
    }
    row[most] = largest;
}

template <class T>
MINDLORA_INLINE void WriteRow(const float* row, int64_t size, int64_t pitch, T* y)
{
    const float total = row[pitch - 1];
    for (int64_t d = 0; d < size; d += kWidth) StoreUpTo(LoadUpTo(row + d, size - d) / total, y + d, size - d);
}

MINDLORA_INLINE int64_t Pitch(int64_t size) { return Rounded(size + 2, kWidth); }

template <class T>
static void OneTask(
    const AttentionShape& a, const AttentionTask& task, const T* keys, const T* values, float* parts, T* y)
{
    const Sequence& s = *task.sequence;
    const Rows rows{
        task.heads, task.queries * a.group, a.size, Pitch(a.size), a.group, s.context - s.queries + task.query + 1};
    const int64_t count = rows.heads * rows.count;
    const Workspace w = MakeWorkspace(rows);
    PackQueries(a, task, rows, y, w.q);
    float* total = task.part < 0 ? w.total : parts + task.part * rows.pitch;
    for (int64_t piece = task.piece; piece < task.pieces; ++piece) {
        OnePiece(a, task, rows, piece, keys, values, w);
        if (piece == task.piece) {
            std::memcpy(total, w.state, count * rows.pitch * sizeof(float));
        } else {
            for (int64_t r = 0; r < count; ++r) Merge(w.state + r * rows.pitch, rows.pitch, total + r * rows.pitch);
        }
    }
    for (int64_t r = 0; r < count && task.part < 0; ++r) {
        WriteRow(total + r * rows.pitch, a.size, rows.pitch, y + a.RowAt(task, r / rows.count, r % rows.count));
    }
}

// Adds up the pieces of a sequence.
template <class T>
static void Join(const AttentionShape& a, const AttentionTask& task, float* parts, T* y)
{
    const int64_t pitch = Pitch(a.size), rows = task.queries * a.group, count = task.heads * rows;
    for (int64_t r = 0; r < count; ++r) {
        float* row = parts + (task.part + r) * pitch;
        for (int64_t piece = 1; piece < task.pieces; ++piece) Merge(row + piece * count * pitch, pitch, row);
        WriteRow(row, a.size, pitch, y + a.RowAt(task, r / rows, r % rows));
    }
}

// y holds the turned queries, and then the output.
template <class T>
static void PagedAttention(
    const AttentionShape& a, const AttentionPlan& plan, const T* keys, const T* values, int threads, T* y)
{
    static thread_local std::vector<float> buffer;
    float* parts = Scratch(&buffer, plan.parts * Pitch(a.size));
#pragma omp parallel num_threads(threads) if (plan.tasks.size() > 1)
    {
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < plan.tasks.size(); ++i) OneTask(a, plan.tasks[i], keys, values, parts, y);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < plan.joins.size(); ++i) Join(a, plan.joins[i], parts, y);
    }
}
