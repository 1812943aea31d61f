// multi_lora_delta for many tokens, in three steps with a synchronization of all cores between them, as in lora_delta's
// prefill: shrink and expand on the cube cores, where rows that share an adapter share its product; between them the
// vector cores sum up the slices of K, row by row with its adapter's scale.
#pragma once

#include "ascendc_common/prefill_vector.h"
#include "multi_lora_delta_prefill_cube.h"
#include "multi_lora_delta_prefill_pass.h"

namespace mindlora {

template <typename T>
__aicore__ inline void ReduceByRow(
    PrefillVector<T>& vector, const MultiLoraDeltaTiling& sizes, const Adapters& adapters, GM_ADDR scales)
{
    AscendC::GlobalTensor<float> scalesGm;
    scalesGm.SetGlobalBuffer((__gm__ float*)scales, sizes.slots);
    const Range mine = vector.Mine(sizes.tokens, 1);
    for (uint32_t token = mine.begin; token < mine.end; ++token) {
        const int32_t slot = adapters.SlotOf(token);
        if (slot >= 0) {
            const uint32_t begin = token * sizes.maxRank;
            vector.Reduce({begin, begin + adapters.RankOf(slot)}, scalesGm.GetValue(slot));
        }
    }
}

template <typename T>
__aicore__ inline void MultiLoraDeltaPrefill(GM_ADDR y0, GM_ADDR x, GM_ADDR pool, GM_ADDR ranks, GM_ADDR scales,
    GM_ADDR indices, GM_ADDR y, GM_ADDR workspace, const MultiLoraDeltaTiling& sizes)
{
    if constexpr (sizeof(T) == sizeof(half)) {  // the plan sends no other types here
        AscendC::TPipe pipe;
        const PrefillExchange<T> exchange(sizes.tokens, sizes.maxRank, sizes.prefill.shrinkSlices, workspace);
        const Adapters adapters(sizes, ranks, indices);
        if ASCEND_IS_AIC {
            MultiLoraDeltaPrefillCube<T> cube(pipe, sizes, exchange, adapters, pool);
            cube.Shrink(x);
            AscendC::SyncAll<false>();
            // The vector cores reduce.
            AscendC::SyncAll<false>();
            cube.Expand(y0, y);
        }
        if ASCEND_IS_AIV {
            PrefillVector<T> vector(pipe, sizes.prefill, exchange);
            vector.WriteIdentityOnce();
            AscendC::SyncAll<false>();
            ReduceByRow(vector, sizes, adapters, scales);
            AscendC::SyncAll<false>();
            PrefillPass<T>(pipe, sizes, adapters).Run(vector.Mine(sizes.tokens, 1), y0, y);
        }
    }
}

}  // namespace mindlora
