// The gradient of masked_attention. Included after masked_attention_kernel.h, in the same namespaces.

// So many panels of queries are summed into the gradients of keys and values together.
constexpr int64_t kPanels = 2;

// What a thread needs of one head.
struct GradMemory {
    float *keys, *values, *rows, *of_rows, *columns, *weights, *grads, *sums;
};

static GradMemory TakeMemory(const AttentionSizes& a, int64_t width)
{
    const int64_t of_keys = a.tokens * width, of_block = kPanels * kLanes;
    Memory memory(2 * of_keys + of_block * 2 * (width + a.tokens) + kLanes * (a.size + width) + 128);
    GradMemory m;
    m.keys = memory.Take(of_keys);
    m.values = memory.Take(of_keys);
    m.rows = memory.Take(of_block * width);
    m.of_rows = memory.Take(of_block * width);
    m.columns = memory.Take(kLanes * a.size);
    m.weights = memory.Take(of_block * a.tokens);
    m.grads = memory.Take(of_block * a.tokens);
    m.sums = memory.Take(kLanes * width);
    return m;
}

// The weights of a panel, the gradients of its scores, and that of its queries, in m.sums.
static void GradPanel(const AttentionSizes& a, const Block& block, int64_t panel, const float* mask, int64_t queries,
    float scale, int64_t width, const GradMemory& m)
{
    float* const weights = m.weights + panel * a.tokens * kLanes;
    float* const grads = m.grads + panel * a.tokens * kLanes;
    Turn(m.rows + panel * kLanes * width, a.size, width, scale, m.columns);
    Weights(block, panel, m.keys, width, m.columns, a.size, mask, queries, weights);
    Turn(m.of_rows + panel * kLanes * width, a.size, width, 1, m.columns);
    EachSeen(block, panel, [&](int64_t begin, int64_t end, char) {
        Products(m.values + begin * width, width, end - begin, m.columns, a.size, grads + begin * kLanes);
    });
    ScoreGrads(block, panel, scale, weights, grads);
    std::fill_n(m.sums, kLanes * width, 0.0f);
    EachSeen(block, panel, [&](int64_t begin, int64_t end, char) {
        AddOverKeys(grads + begin * kLanes, m.keys + begin * width, end - begin, width, m.sums);
    });
}

// One head of one row of a batch. `of_keys` and `of_values`, [tokens][width], are sums over the queries of this head.
static void GradHead(const AttentionSizes& a, const char* kinds, const Head& of_y, const Head& query, const Head& key,
    const Head& value, const float* mask, float scale, float* of_keys, float* of_values, float* of_query,
    int64_t stride)
{
    const int64_t tokens = a.tokens, width = Padded(a.size, kLanes), tiles = (tokens + kKeyTile - 1) / kKeyTile;
    const GradMemory m = TakeMemory(a, width);
    CopyRows(key, 0, tokens, tokens, a.size, width, m.keys);
    CopyRows(value, 0, tokens, tokens, a.size, width, m.values);
    std::fill_n(of_keys, tokens * width, 0.0f);
    std::fill_n(of_values, tokens * width, 0.0f);
    for (int64_t first = 0; first < tokens; first += kPanels * kLanes) {
        const int64_t queries = std::min(kPanels * kLanes, tokens - first);
        const Block block{(queries + kLanes - 1) / kLanes, tokens, kinds + first / kLanes * tiles, tiles};
        CopyRows(query, first, queries, kPanels * kLanes, a.size, width, m.rows);
        CopyRows(of_y, first, queries, kPanels * kLanes, a.size, width, m.of_rows);
        for (int64_t panel = 0; panel < block.panels; ++panel) {
            const int64_t begin = first + panel * kLanes, count = std::min<int64_t>(kLanes, tokens - begin);
            GradPanel(a, block, panel, mask + begin * tokens, count, scale, width, m);
            for (int64_t i = 0; i < count; ++i) {
                std::copy_n(m.sums + i * width, a.size, of_query + (begin + i) * stride);
            }
        }
        for (int64_t tile = 0; tile < tiles; ++tile) {
            AddOverQueries(block, tile, m.weights, m.of_rows, width, of_values);
            AddOverQueries(block, tile, m.grads, m.rows, width, of_keys);
        }
    }
}

// to[token] = the sum of the parts of a group of heads, which lie `step` apart.
static void SumGroup(
    const AttentionSizes& a, const float* parts, int64_t step, int64_t width, int64_t stride, float* to)
{
    for (int64_t token = 0; token < a.tokens; ++token) {
        for (int64_t d = 0; d < a.size; d += kWidth) {
            Vec sum = {};
            for (int64_t head = 0; head < a.Group(); ++head) sum += Load(parts + head * step + token * width + d);
            StoreUpTo(sum, to + token * stride + d, a.size - d);
        }
    }
}

// `grads` is [rows, tokens, heads + 2 * key_heads, size]: the heads of the queries, of the keys and of the values.
static void MaskedAttentionGrad(const AttentionSizes& a, const float* of_y, const float* query, const float* key,
    const float* value, const float* mask, float scale, int threads, float* grads)
{
    const std::vector<char> kinds = AllKinds(a, mask, threads);
    const int64_t of_row = kinds.size() / std::max<int64_t>(1, a.rows);
    const int64_t width = Padded(a.size, kLanes), part = a.tokens * width;
    const int64_t stride = (a.heads + 2 * a.key_heads) * a.size;
    static thread_local std::vector<float> buffer;
    float* const parts = Scratch(&buffer, a.rows * a.heads * 2 * part);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a.rows * a.heads; ++i) {
            const int64_t row = i / a.heads, head = i % a.heads;
            const int64_t at = a.Query(row, head), of_key = a.Key(row, head / a.Group());
            GradHead(a, kinds.data() + row * of_row, {of_y + at, a.heads * a.size}, {query + at, a.heads * a.size},
                {key + of_key, a.key_heads * a.size}, {value + of_key, a.key_heads * a.size},
                mask + row * a.tokens * a.tokens, scale, parts + 2 * i * part, parts + (2 * i + 1) * part,
                grads + row * a.tokens * stride + head * a.size, stride);
        }
#pragma omp for
        for (int64_t i = 0; i < a.rows * a.key_heads; ++i) {
            const int64_t row = i / a.key_heads, head = i % a.key_heads;
            const float* const from = parts + 2 * (row * a.heads + head * a.Group()) * part;
            float* const to = grads + row * a.tokens * stride + (a.heads + head) * a.size;
            SumGroup(a, from, 2 * part, width, stride, to);
            SumGroup(a, from + part, 2 * part, width, stride, to + a.key_heads * a.size);
        }
    }
}
