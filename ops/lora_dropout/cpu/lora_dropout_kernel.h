// Compiled once for each instruction set: see cpu_common/for_each_isa.h. The compiler vectorizes the loop.

inline uint32_t Mixed(uint32_t h)
{
    h ^= h >> 16;
    h *= 0x7FEB352Du;
    h ^= h >> 15;
    h *= 0x846CA68Bu;
    return h ^ (h >> 16);
}

// y[t, k] = x[t, k] * factor where 31 bits of the hash of (seed, t, k) are at least `least`, else 0.
template <class T>
void LoraDropout(
    const T* x, uint32_t seed, uint32_t least, float factor, int64_t tokens, int64_t channels, int threads, T* y)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const uint32_t row = Mixed(static_cast<uint32_t>(t) * 0x9E3779B1u + seed);
        const T* const in = x + t * channels;
        T* const out = y + t * channels;
        for (int64_t k = 0; k < channels; ++k) {
            const uint32_t h = Mixed(row + static_cast<uint32_t>(k) * 0x85EBCA77u) & 0x7FFFFFFFu;
            // A product with zero would let infinity and NaN through.
            FromFloat(h >= least ? ToFloat(in[k]) * factor : 0.0f, out + k);
        }
    }
}
