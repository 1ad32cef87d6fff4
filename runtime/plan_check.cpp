#include "runtime/plan_check.h"

#include <algorithm>

#include "terrace/adam.h"
#include "tiers/residency.h"

namespace terrace {
namespace {

constexpr std::size_t kMaxProblems = 20;

class Replay {
 public:
  explicit Replay(const CheckedPlans& plans) : plans_(plans) {
    for (const Content content : kHomed) {
      for (std::uint32_t l = 0; l < plans.layout.layers(); ++l) {
        for (const auto& piece : plans.map.homes.of(content, LayerId{l})) {
          table_.place(piece.tier, piece.extent, {content, LayerId{l}, 0}, piece.data_offset);
        }
      }
    }
    for (const Tier tier : kTiers) {
      if (at(plans.map.peak, tier) > at(plans.budget, tier)) {
        problem(std::string(to_string(tier)) + " peak exceeds the budget");
      }
    }
  }

  void run(const StepPlan& plan) {
    ++pass_;
    const bool deferred = plan.schedule.update_time == UpdateTime::deferred;
    const bool updates = deferred ? plan.schedule.pending : plan.schedule.training;
    made_ = plan.schedule.pending ? steps_ + 1 : steps_;
    for (op_ = 0; op_ < plan.operations.size(); ++op_) check(plan, plan.operations[op_]);
    if (updates) ++steps_;
    check_homes();
    if (!plan.schedule.training) return;
    count_micro_batch(plan.schedule);
    check_kept_gradients(kept_gradient(plan.schedule.accumulates));
    if (!plan.schedule.last) return;
    gradients_ = pass_;
    check_sums();
  }

  std::vector<std::string> problems() { return std::move(problems_); }

 private:
  void count_micro_batch(const LayerSchedule& schedule) {
    const auto count = plans_.form.micro_batches;
    const bool last = micro_batch_ + 1 == count;
    if (schedule.accumulates != (count > 1) || schedule.first != (micro_batch_ == 0) ||
        schedule.last != last) {
      problem("a micro-batch is out of turn");
    }
    micro_batch_ = last ? 0 : micro_batch_ + 1;
  }

  static constexpr Content kHomed[] = {Content::parameter, Content::master_weight,
                                       Content::momentum, Content::variance};

  void problem(const std::string& text) {
    if (problems_.size() < kMaxProblems) {
      problems_.push_back("pass " + std::to_string(pass_) + " operation " + std::to_string(op_) +
                          ": " + text);
    }
  }

  void check(const StepPlan& plan, const Operation& operation) {
    for (const auto dependency : plan.dependencies_of(op_)) {
      if (dependency >= op_) problem("a dependency points forward");
    }
    const auto operands = plan.operands_of(op_);
    for (const auto& operand : operands) {
      if (operand.extent.end() > at(plans_.map.peak, operand.tier)) {
        problem("an address lies outside the map");
      }
      const bool page = operand.content != Content::gradient_sum;
      if (page && operand.extent.offset.count % kPage.count != 0)
        problem("an address is not aligned");
    }
    switch (operation.kind) {
      case OpKind::forward:
      case OpKind::backward: use(operation, operands); break;
      case OpKind::update: update(plan, operation, operands); break;
      case OpKind::accumulate: accumulate(plan, operation, operands); break;
      case OpKind::measure: measure(operation, operands); break;
      case OpKind::commit: commit(operands); break;
      default: transfer(operation, operands);
    }
  }

  // The version that an operand's content must have now. Saved inputs and gradients are made anew
  // in every pass; parameters and states count the finished steps.
  std::uint64_t version(Content content) const {
    return class_of(content) == TensorClass::parameter ||
                   class_of(content) == TensorClass::optimizer_state
               ? steps_
               : pass_;
  }

  void expect(const Operand& operand, std::uint64_t wanted) {
    const auto wrong = table_.mismatch(operand.tier, operand.extent,
                                       {operand.content, operand.layer, wanted},
                                       operand.data_offset);
    if (!wrong.empty()) problem(wrong);
  }

  // Layer functions: each needs its whole parameters, input and output gradient.
  void use(const Operation& operation, std::span<const Operand> operands) {
    Bytes parameter;
    for (const auto& operand : operands) {
      if (operand.tier != Tier::hbm) problem("a layer function uses bytes outside HBM");
      if (operand.content == Content::parameter) parameter = operand.extent.size;
      if (!reads(operand.access)) continue;
      expect(operand, operand.content == Content::parameter ? made_ : version(operand.content));
    }
    for (const auto& operand : operands) {
      if (operand.content == Content::workspace) {
        table_.forget(operand.tier, operand.extent);
      } else if (writes(operand.access)) {
        table_.place(operand.tier, operand.extent,
                     {operand.content, operand.layer, version(operand.content)},
                     operand.data_offset);
      }
    }
    if (parameter != plans_.layout.block_size(operation.layer, Content::parameter)) {
      problem("a layer function does not see the whole block");
    }
  }

  void update(const StepPlan& plan, const Operation& operation, std::span<const Operand> operands) {
    if (operation.pending != plan.schedule.pending) problem("an update is of the wrong step");
    const auto gradients = operation.pending ? gradients_ : pass_;
    std::size_t covered = 0;
    for (const auto& operand : operands) {
      if (operand.tier != Tier::dram) problem("an update uses bytes outside DRAM");
      if (reads(operand.access)) {
        const bool gradient = class_of(operand.content) == TensorClass::gradient;
        expect(operand, gradient ? gradients : version(operand.content));
      }
      if (operand.extent.size ==
          operation.elements.count * plans_.layout.element_size(operand.content)) {
        ++covered;
      }
    }
    if (covered != 5) problem("an update does not see all five contents of its elements");
    for (const auto& operand : operands) {
      if (writes(operand.access)) {
        table_.place(operand.tier, operand.extent, {operand.content, operand.layer, steps_ + 1},
                     operand.data_offset);
      }
    }
  }

  // The sum's version is the pass whose gradients are its newest: none may be left out.
  void accumulate(const StepPlan& plan, const Operation& operation,
                  std::span<const Operand> operands) {
    const auto whole = [&](const Operand& operand) {
      return operand.tier == Tier::dram &&
             operand.extent.size ==
                 operation.elements.count * plans_.layout.element_size(operand.content);
    };
    if (operands.size() != 2 || operands[0].content != Content::gradient ||
        operands[1].content != Content::accumulated_gradient || !whole(operands[0]) ||
        !whole(operands[1]) || reads(operands[1].access) == plan.schedule.first ||
        !writes(operands[1].access)) {
      problem("an addition is not of one run's gradients");
      return;
    }
    expect(operands[0], pass_);
    if (reads(operands[1].access)) expect(operands[1], pass_ - 1);
    table_.place(operands[1].tier, operands[1].extent,
                 {operands[1].content, operands[1].layer, pass_}, operands[1].data_offset);
  }

  void measure(const Operation& operation, std::span<const Operand> operands) {
    if (operands.size() != 2 || operation.pending) {
      problem("a measurement is not of one run's gradients");
      return;
    }
    expect(operands[0], pass_);
    if (operands[1].data_offset.count != sizeof(double) * leaves_of(operation.elements.first) ||
        operands[1].extent.size.count != sizeof(double) * leaves_of(operation.elements.count) ||
        operation.elements.first % kGradientLeaf != 0) {
      problem("a measurement's sums are not those of its elements");
    }
    table_.place(operands[1].tier, operands[1].extent,
                 {Content::gradient_sum, operands[1].layer, pass_}, operands[1].data_offset);
  }

  void check_sums() {
    for (std::uint32_t l = 0; l < plans_.layout.layers(); ++l) {
      const auto& block = plans_.layout.block(LayerId{l});
      const Extent sums{plans_.map.gradient_sums[l].offset,
                        {sizeof(double) * leaves_of(block.elements)}};
      if (block.elements == 0) continue;
      const auto wrong =
          table_.mismatch(Tier::dram, sums, {Content::gradient_sum, LayerId{l}, pass_}, {});
      if (!wrong.empty()) problem("after the step, " + wrong);
    }
  }

  void check_kept_gradients(Content kept) {
    for (std::uint32_t l = 0; l < plans_.layout.layers(); ++l) {
      for (const auto& piece : plans_.map.homes.of(kept, LayerId{l})) {
        const auto lost = table_.mismatch(piece.tier, piece.extent, {kept, LayerId{l}, pass_},
                                          piece.data_offset);
        if (!lost.empty()) problem("after the pass, " + lost);
      }
    }
  }

  void commit(std::span<const Operand> operands) {
    if (operands.size() != 1 || operands[0].tier != Tier::nvme ||
        operands[0].extent != Extent{{}, plans_.map.durable} || !reads(operands[0].access)) {
      problem("a commit does not cover the durable part");
    }
    for (std::size_t s = 0; s < kOptimizerStateCount; ++s) {
      for (std::uint32_t l = 0; l < plans_.layout.layers(); ++l) {
        const Bytes size = plans_.layout.block_size(LayerId{l}, kOptimizerStates[s]);
        const auto wrong = table_.mismatch(Tier::nvme, {plans_.map.durable_base[s][l], size},
                                           {kOptimizerStates[s], LayerId{l}, steps_ + 1}, {});
        if (size.count > 0 && !wrong.empty()) problem("at the commit, " + wrong);
      }
    }
  }

  // A transfer carries whatever version lies at its source; whoever uses the bytes judges it.
  void transfer(const Operation& operation, std::span<const Operand> operands) {
    if (operands.size() != 2 || operands[0].extent.size != operands[1].extent.size ||
        operands[0].extent.size != operation.bytes) {
      problem("a transfer's ends differ in size");
      return;
    }
    const auto& source = operands[0];
    const auto& target = operands[1];
    const auto wanted = version(source.content);
    const bool counts_steps = wanted == steps_ && source.content != Content::activation &&
                              source.content != Content::gradient;
    for (const std::uint64_t candidate : {counts_steps ? wanted + 1 : wanted, wanted}) {
      const DataId data{source.content, source.layer, candidate};
      if (table_.mismatch(source.tier, source.extent, data, source.data_offset).empty()) {
        table_.place(target.tier, target.extent, data, target.data_offset);
        return;
      }
    }
    problem("a transfer's source holds no version of its bytes");
  }

  void check_homes() {
    for (const Content content : kHomed) {
      for (std::uint32_t l = 0; l < plans_.layout.layers(); ++l) {
        Bytes covered;
        for (const auto& piece : plans_.map.homes.of(content, LayerId{l})) {
          const auto wrong = table_.mismatch(piece.tier, piece.extent,
                                             {content, LayerId{l}, steps_}, piece.data_offset);
          if (!wrong.empty()) problem("after the step, " + wrong);
          covered += piece.extent.size;
        }
        if (covered != plans_.layout.block_size(LayerId{l}, content)) {
          problem("a block has no home for some of its bytes");
        }
      }
    }
  }

  const CheckedPlans& plans_;
  Residency table_;
  std::uint64_t pass_ = 0;
  std::uint64_t steps_ = 0;
  std::uint64_t made_ = 0;       // the version of parameters that layer functions must see
  std::uint64_t gradients_ = 0;  // the pass that made those that are kept
  std::uint32_t micro_batch_ = 0;  // that comes next
  OpIndex op_ = 0;
  std::vector<std::string> problems_;
};

bool conflict(std::span<const Operand> first, std::span<const Operand> second) {
  for (const auto& a : first) {
    for (const auto& b : second) {
      if (a.tier == b.tier && (writes(a.access) || writes(b.access)) &&
          a.extent.overlaps(b.extent)) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

std::vector<std::string> check_plans(const CheckedPlans& plans) {
  using enum PassKind;
  constexpr PassKind kOverlapped[] = {training,   training,   committing, evaluation,
                                      committing, committing, training,   evaluation};
  constexpr PassKind kDeferred[] = {
      fresh,      training,   training, committing,          settling, evaluation, fresh,     fresh,
      committing, committing, training, settling_committing, fresh,    settling,   evaluation};
  Replay replay(plans);
  const auto run = [&](std::span<const PassKind> kinds) {
    for (const auto kind : kinds) {
      replay.run(plans.plan(kind));
      if (!plans.plan(kind).schedule.training) continue;
      for (std::uint32_t micro_batch = 1; micro_batch < plans.form.micro_batches; ++micro_batch) {
        replay.run(plans.plan(kind_of(micro_batch, plans.form)));
      }
    }
  };
  if (plans.form.update_time == UpdateTime::deferred)
    run(kDeferred);
  else
    run(kOverlapped);
  return replay.problems();
}

std::vector<std::string> check_order(const StepPlan& previous, const StepPlan& next,
                                     const BoundaryDependencies& boundary) {
  const std::size_t base = previous.operations.size();
  const std::size_t count = base + next.operations.size();
  std::vector<std::vector<bool>> before(count, std::vector<bool>(count));  // [op][earlier one]
  const auto inherit = [&](std::size_t op, std::size_t dependency) {
    before[op][dependency] = true;
    for (std::size_t i = 0; i < dependency; ++i) {
      if (before[dependency][i]) before[op][i] = true;
    }
  };
  std::vector<std::string> problems;
  auto crossing = boundary.begin();
  for (std::size_t op = 0; op < count; ++op) {
    const bool late = op >= base;
    const auto& plan = late ? next : previous;
    const auto local = static_cast<OpIndex>(late ? op - base : op);
    for (const auto dependency : plan.dependencies_of(local)) {
      inherit(op, dependency + (late ? base : 0));
    }
    for (; late && crossing != boundary.end() && crossing->first == local; ++crossing) {
      inherit(op, crossing->second);
    }
    for (std::size_t other = 0; other < op; ++other) {
      const auto& other_plan = other >= base ? next : previous;
      const auto other_local = static_cast<OpIndex>(other >= base ? other - base : other);
      if (!before[op][other] &&
          conflict(other_plan.operands_of(other_local), plan.operands_of(local))) {
        problems.push_back("operations " + std::to_string(other) + " and " + std::to_string(op) +
                           " touch the same bytes in no order");
        if (problems.size() >= kMaxProblems) return problems;
      }
    }
  }
  return problems;
}

}  // namespace terrace
