// Compiled once for each instruction set, with MOE_SERVE_KERNELS as the table's name.
#include "api.h"
#include "attention.h"
#include "experts.h"
#include "limits.h"
#include "quantize.h"
#include "rows.h"

namespace {

int quantize(const QuantizeCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_quantize<float>(*call) : run_quantize<bf16>(*call);
}

// run(step) for weights of so many bits, 0 being as many as `dtype` has.
template <class Run>
int with_step(int32_t dtype, int32_t bits, Run run) {
  if (dtype == MOE_SERVE_FLOAT32)
    return bits == 8   ? run(QuantizedStep<float, 8>{})
           : bits == 4 ? run(QuantizedStep<float, 4>{})
                       : run(FloatStep{});
  return bits == 8   ? run(QuantizedStep<bf16, 8>{})
         : bits == 4 ? run(QuantizedStep<bf16, 4>{})
                     : run(PairStep{});
}

int moe(const MoeCall* call) {
  return with_step(call->dtype, call->gate_up.bits,
                   [=](auto step) { return run_moe<decltype(step)>(*call); });
}

int grouped(const GroupedCall* call) {
  return with_step(call->dtype, call->weight.bits,
                   [=](auto step) { return run_grouped<decltype(step)>(*call); });
}

int norm(const NormCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_norm<float>(*call) : run_norm<bf16>(*call);
}

int attention_inputs(const AttentionInputsCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_attention_inputs<float>(*call)
                                          : run_attention_inputs<bf16>(*call);
}

int router(const RouterCall* call) { return run_router(*call); }

int attention(const AttentionCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_attention<FloatStep>(*call)
                                          : run_attention<PairStep>(*call);
}

float read(const LimitCall* call) { return run_read(*call); }

double peak(const LimitCall* call) {
  if (call->dtype == MOE_SERVE_FLOAT32) return run_peak<FloatStep>(*call);
#if defined(MOE_SERVE_AMX)
  return run_tile_peak(*call);
#else
  return run_peak<PairStep>(*call);
#endif
}

}  // namespace

extern const Kernels MOE_SERVE_KERNELS;
const Kernels MOE_SERVE_KERNELS = {quantize, moe, grouped, norm, attention_inputs, router,
                                   attention, read, peak};
