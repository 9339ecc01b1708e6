// Compiled once for each instruction set, with MOE_SERVE_KERNELS as the table's name.
#include "api.h"
#include "experts.h"
#include "rows.h"

namespace {

int moe(const MoeCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_moe<FloatStep>(*call) : run_moe<PairStep>(*call);
}

int grouped(const GroupedCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_grouped<FloatStep>(*call)
                                          : run_grouped<PairStep>(*call);
}

int norm(const NormCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_norm<float>(*call) : run_norm<bf16>(*call);
}

int attention_inputs(const AttentionInputsCall* call) {
  return call->dtype == MOE_SERVE_FLOAT32 ? run_attention_inputs<float>(*call)
                                          : run_attention_inputs<bf16>(*call);
}

int router(const RouterCall* call) { return run_router(*call); }

}  // namespace

extern const Kernels MOE_SERVE_KERNELS;
const Kernels MOE_SERVE_KERNELS = {moe, grouped, norm, attention_inputs, router};
