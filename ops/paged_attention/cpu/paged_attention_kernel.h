// The kernel of paged_attention. Included by for_each_isa.h, once in the namespace of each instruction set.

// One row of one head.
template <class T>
static void OneRow(const AttentionShape& a, const T* query, const T* keys, const T* values, const int32_t* table,
    int64_t kv_head, int64_t length, T* y)
{
    static thread_local std::vector<float> buffer;
    float* weights = Scratch(&buffer, length + a.size);
    float* sum = weights + length;
    float most = -INFINITY, total = 0;
    for (int64_t j = 0; j < length; ++j) {
        const T* key = keys + a.Offset(table, j, kv_head);
        float dot = 0;
        for (int64_t d = 0; d < a.size; ++d) dot += ToFloat(query[d]) * ToFloat(key[d]);
        weights[j] = dot * a.scale;
        most = std::max(most, weights[j]);
    }
    for (int64_t d = 0; d < a.size; ++d) sum[d] = 0;
    for (int64_t j = 0; j < length; ++j) {
        const T* value = values + a.Offset(table, j, kv_head);
        const float weight = std::exp(weights[j] - most);
        total += weight;
        for (int64_t d = 0; d < a.size; ++d) sum[d] += weight * ToFloat(value[d]);
    }
    for (int64_t d = 0; d < a.size; ++d) FromFloat(sum[d] / total, y + d);
}

template <class T>
static void PagedAttention(const AttentionShape& a, const T* query, const T* keys, const T* values,
    const std::vector<Sequence>& sequences, int threads, T* y)
{
    const int64_t heads = a.kv_heads * a.group;
    for (const Sequence& s : sequences) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
        for (int64_t i = 0; i < s.queries; ++i) {
            for (int64_t head = 0; head < heads; ++head) {
                const int64_t at = ((s.first + i) * heads + head) * a.size;
                OneRow(a, query + at, keys, values, s.table, head / a.group, s.context - s.queries + i + 1, y + at);
            }
        }
    }
}
