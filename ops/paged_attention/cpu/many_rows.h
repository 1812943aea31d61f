// Many rows of a sequence, such as its prompt: tiles of rows against tiles of keys, in registers.
// Included by paged_attention_kernel.h.

// M rows against the keys of a tile.
template <int M>
static void RowTile(
    const Rows& rows, const float* q, const float* kt, const float* const* values, const int64_t* seen, float* state)
{
    alignas(64) float scores[M * kKeys];
    for (int64_t j = 0; j < seen[M - 1];) {
        WithVectors((seen[M - 1] - j + kWidth - 1) / kWidth, [&](auto constant) {
            constexpr int J = decltype(constant)::value;
            Scores<M, J>(q, kt + j, rows.size, scores + j);
            j += J * kWidth;
        });
    }
    Weigh<M>(scores, seen, rows.pitch, state);
    AddAllValues<M>(scores, values, rows.size, rows.pitch, seen, state, [] {});
}

// One head of the keys and values of up to kKeys tokens in float32, the keys as columns.
template <class T>
static void PackTile(const Tokens<T>& keys, const Tokens<T>& values, int64_t ahead, int64_t size, const Workspace& w)
{
    const int64_t step = Rounded(size, kWidth);
    for (int64_t j = 0; j < keys.count; j += kWidth) {
        const T* rows[kWidth];
        for (int64_t i = 0; i < kWidth; ++i) rows[i] = keys.At(std::min(j + i, keys.count - 1));
        const int64_t next = std::max<int64_t>(0, std::min<int64_t>(kWidth, ahead - j));
        for (const Tokens<T>& tokens : {keys, values}) {
            const Tokens<T> later{tokens.from, tokens.places + kKeys + j, next};
            Ahead<T>(later, size).AskTo(1, 1);
        }
        PackKeys(rows, size, kKeys, w.kt + j);
    }
    for (int64_t j = 0; j < values.count; ++j) {
        for (int64_t d = 0; d < size; d += kWidth) {
            Store(LoadUpTo(values.At(j) + d, size - d), w.values + j * step + d);
        }
    }
}

// All rows of a task, which has one head, against keys [begin, end).
template <class T>
static void ManyRows(const Rows& rows, const T* keys, const T* values, int64_t begin, int64_t end,
    const int64_t* places, const Workspace& w)
{
    const float* packed[kKeys];
    for (int64_t j = 0; j < kKeys; ++j) packed[j] = w.values + j * Rounded(rows.size, kWidth);
    for (int64_t tile = begin; tile < end; tile += kKeys) {
        const int64_t count = std::min<int64_t>(kKeys, end - tile), ahead = end - tile - count;
        const int64_t* at = places + tile - begin;
        PackTile(Tokens<T>{keys, at, count}, Tokens<T>{values, at, count}, ahead, rows.size, w);
        for (int64_t r = 0; r < rows.count;) {
            WithTileRows(rows.count - r, [&](auto constant) {
                constexpr int M = decltype(constant)::value;
                int64_t seen[M];
                for (int m = 0; m < M; ++m) seen[m] = std::min(rows.Sees(r + m) - tile, count);
                if (seen[M - 1] > 0) {
                    RowTile<M>(rows, w.q + r * rows.size, w.kt, packed, seen, w.state + r * rows.pitch);
                }
                r += M;
            });
        }
    }
}
