// Functions that a step calls too often for Python: casts of autocast, loops over modules, gradients and the autograd graph.
//
// The kernels follow rules from Python, one byte for each op. casting/dispatcher_kernels.py has the references, which also make
// the calls that a rule leaves to Python. Compiled at first use by native.py.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/extension.h>

#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;

// Keys of backends with tensors that only vendor builds of torch can make. KEY has priority over KEY_OF_PYTHON, which has
// the Python kernels: a call is left to them with KEY excluded.
constexpr auto KEY = DispatchKey::AutocastHPU, KEY_OF_PYTHON = DispatchKey::AutocastIPU;

enum class Rule : uint8_t { python, unchanged, lower_precision, fp32, fp32_output, widest };

// The byte of a rule has the Rule, and in its upper half the exception if the first tensor is on a CPU.
enum class OnCpu : uint8_t { same, python, python_if_large, through_fp32 };
constexpr uint8_t CPU_SHIFT = 4, RULE_MASK = 15;

struct Sizes {
  int64_t large, small;  // limits in elements, of the largest tensor and of all: hf_mp/casting/cpu/
};

// Working copies by the address of a weight or its alias: hf_mp/weights/slots.py, WeightSlots.working_copy().
class Copies {
 public:
  // Without a copy, Python makes one when an op reads the weight.
  void add(const Tensor& tensor, const std::optional<Tensor>& copy) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_[tensor.unsafeGetTensorImpl()] = {tensor, copy.value_or(Tensor()), version_of(tensor)};
  }

  // Called after Python has compared all copies with the weights: another version then means that a weight was written.
  void validate() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [impl, entry] : entries_) entry.version = version_of(entry.tensor);
  }

  // Leave calls that read the weight to Python until validate(), because `.data` may be written without a new version.
  void invalidate(const Tensor& tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = entries_.find(tensor.unsafeGetTensorImpl()); found != entries_.end()) found->second.version = -1;
  }

  // Return the copy; nullopt if the tensor is not a weight; undefined if Python has to make the call.
  std::optional<Tensor> find(const Tensor& tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(tensor.unsafeGetTensorImpl());
    if (found == entries_.end()) return std::nullopt;
    const Entry& entry = found->second;
    return entry.version == -1 || entry.version != version_of(tensor) ? Tensor() : entry.copy;
  }

 private:
  struct Entry {
    Tensor tensor, copy;
    int64_t version;
  };

  static int64_t version_of(const Tensor& tensor) { return tensor.is_inference() ? -1 : tensor._version(); }

  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::mutex mutex_;  // kernels run without the GIL
};

struct Plan {
  std::string rules;  // by the number of an op
  at::ScalarType dtype;
  Sizes sizes;
};

struct Running {
  const Plan* plan;  // owned by the running autocast
  std::shared_ptr<Copies> copies;  // null if the forward has no weights
  bool is_reading;  // the forward began with gradients disabled
  int task;  // id of the backward around the forward, or -1
  bool is_innermost = true;  // false while a nested autocast has priority
};

thread_local std::vector<Running> running;

bool is_castable(const Tensor& tensor) {
  return tensor.defined() && at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != at::kDouble;
}

template <class Function>
void for_each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) function(tensor);
  }
}

Tensor cast(const Tensor& tensor, at::ScalarType dtype) { return is_castable(tensor) ? tensor.to(dtype) : tensor; }

void cast(IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.scalar_type() != dtype) value = cast(tensor, dtype);
  } else if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& tensor : value.toTensorVector()) found.push_back(cast(tensor, dtype));
    value = found;
  }
}

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(size_t number) : number_(number) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard not_again(KEY);
    // Ops of a backward already have the dtypes of their forward. A backward during a forward is another graph task.
    if (running.empty() || running.back().task != torch::autograd::get_current_graph_task_id() || !make(op, stack)) {
      op.callBoxed(stack);
    }
  }

 private:
  // Return false, without a call, if Python has to make it.
  bool make(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const Running& now = running.back();
    if (!now.is_innermost || (now.is_reading && at::GradMode::is_enabled())) return false;
    const Plan& plan = *now.plan;
    const uint8_t byte = number_ < plan.rules.size() ? plan.rules[number_] : 0;
    const auto rule = static_cast<Rule>(byte & RULE_MASK);
    auto on_cpu = static_cast<OnCpu>(byte >> CPU_SHIFT);
    if (rule == Rule::python) return false;
    const size_t count = op.schema().arguments().size();
    IValue* const args = stack->data() + (stack->size() - count);
    const auto dtype = target(rule, plan, args, count);
    if (!dtype) {
      if (rule == Rule::fp32_output) name_fp32(op, args, count);
      return call(op, stack);
    }
    std::optional<bool> first_is_on_cpu;
    int64_t all = 0, largest = 0;
    bool casts_a_weight = false;
    for (size_t i = 0; i < count; ++i) {
      if (now.copies != nullptr && *dtype == plan.dtype && args[i].isTensor()) {
        const Tensor& tensor = args[i].toTensor();
        if (tensor.defined() && tensor.scalar_type() == at::kFloat) {
          if (const auto copy = now.copies->find(tensor)) {
            if (!copy->defined()) return false;
            args[i] = *copy;
          }
        }
      }
      for_each_tensor(args[i], [&](const Tensor& tensor) {
        if (!tensor.defined()) return;
        if (!first_is_on_cpu) first_is_on_cpu = tensor.device().is_cpu();
        if (on_cpu != OnCpu::same) {
          all += tensor.numel();
          largest = std::max(largest, tensor.numel());
        }
        // Python caches the cast of a trained weight until its autocast ends.
        casts_a_weight |= tensor.requires_grad() && tensor.scalar_type() != *dtype && is_castable(tensor) && tensor.is_leaf();
      });
    }
    if (casts_a_weight) return false;
    if (!first_is_on_cpu.value_or(false)) on_cpu = OnCpu::same;
    if (on_cpu == OnCpu::python || (on_cpu == OnCpu::python_if_large && largest >= plan.sizes.large)) return false;
    if (on_cpu == OnCpu::through_fp32 && all > plan.sizes.small) return false;
    for (size_t i = 0; i < count; ++i) {
      cast(args[i], *dtype);
      if (on_cpu == OnCpu::through_fp32) cast(args[i], at::kFloat);
    }
    call(op, stack);
    if (on_cpu == OnCpu::through_fp32) {
      const size_t results = op.schema().returns().size();
      for (size_t i = stack->size() - results; i < stack->size(); ++i) cast((*stack)[i], *dtype);
    }
    return true;
  }

  // Return the dtype to cast to, nullopt if the rule does not cast.
  static std::optional<at::ScalarType> target(Rule rule, const Plan& plan, const IValue* args, size_t count) {
    if (rule == Rule::lower_precision) return plan.dtype;
    if (rule == Rule::fp32) return at::kFloat;
    if (rule != Rule::widest) return std::nullopt;
    bool has_fp32 = false;
    for (size_t i = 0; i < count; ++i) {
      for_each_tensor(args[i], [&](const Tensor& one) { has_fp32 |= one.defined() && one.scalar_type() == at::kFloat; });
    }
    return has_fp32 ? at::kFloat : plan.dtype;
  }

  // Set the argument `dtype` to FP32. The kernels accumulate 16-bit inputs in FP32, so this saves the cast of the input.
  static void name_fp32(const c10::OperatorHandle& op, IValue* args, size_t count) {
    if (!args[0].isTensor() || !is_castable(args[0].toTensor()) || args[0].toTensor().scalar_type() == at::kFloat) return;
    for (size_t i = 0; i < count; ++i) {
      if (op.schema().arguments()[i].name() == "dtype" && args[i].isNone()) args[i] = static_cast<int64_t>(at::kFloat);
    }
  }

  static bool call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard not_again(KEY_OF_PYTHON);
    op.callBoxed(stack);
    return true;
  }

  const size_t number_;
};

// Register a kernel for an op permanently.
void register_op(const std::string& name_space, const std::string& name, size_t number) {
  static std::map<std::string, torch::Library*> libraries;  // never freed: that would deregister the kernels
  if (libraries.empty()) {  // other ops fall through to the next key
    libraries["_"] = new torch::Library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
    libraries["_"]->fallback(torch::CppFunction::makeFallthrough());
  }
  auto*& library = libraries[name_space];
  if (library == nullptr) library = new torch::Library(torch::Library::IMPL, name_space, KEY, __FILE__, __LINE__);
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(number)));
}

// Whether all edges from the nodes of a forward, with sequence numbers from `first` on, to older nodes in the graph of
// `results` lead to unscale nodes. False also for graphs that only Python can check: hf_mp/scale_boundary.py, add_unscale_hooks.
bool has_no_external_edge(const std::vector<Tensor>& results, uint64_t first, uint64_t highest, py::handle unscale_node) {
  std::vector<torch::autograd::Node*> todo;
  std::unordered_set<torch::autograd::Node*> seen;
  auto add = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) todo.push_back(node);
  };
  for (const Tensor& result : results) add(result.grad_fn().get());
  while (!todo.empty()) {
    torch::autograd::Node* node = todo.back();
    todo.pop_back();
    for (const auto& edge : node->next_edges()) {
      torch::autograd::Node* to = edge.function.get();
      if (to == nullptr) continue;
      const uint64_t number = to->sequence_nr();
      if (number >= first && number < highest) {
        add(to);
        continue;
      }
      auto python = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(edge.function));
      if (!py::type::of(python).is(unscale_node)) return false;
    }
  }
  return true;
}

void append(std::string& key, const void* data, size_t bytes) { key.append(static_cast<const char*>(data), bytes); }

template <class Value>
void append(std::string& key, Value value) {
  append(key, &value, sizeof value);
}

// Call `function(name, value)` for the entries of a dictionary of each module; false if a module has no dictionary.
// hf_mp/model_index.py has the references.
template <class Function>
bool for_each_entry(const py::list& modules, const char* attribute, Function function) {
  const py::str name_of_entries(attribute);  // once: making the string costs as much as the lookup
  for (py::handle module : modules) {
    py::object entries = py::getattr(module, name_of_entries);
    if (!PyDict_Check(entries.ptr())) return false;
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(entries.ptr(), &at, &name, &value);) function(name, value);
  }
  return true;
}

py::object children(const py::list& modules) {
  std::string key;
  if (!for_each_entry(modules, "_modules", [&](PyObject*, PyObject* child) { append(key, child); })) return py::none();
  return py::bytes(key);
}

py::object weights_and_key(const py::list& modules) {
  py::list weights;
  std::string key;
  const bool found = for_each_entry(modules, "_parameters", [&](PyObject* name, PyObject* value) {
    if (value == Py_None) return;
    weights.append(py::handle(value));
    const Tensor& weight = THPVariable_Unpack(value);
    append(key, PyObject_Hash(name));
    append(key, value);
    append(key, weight.requires_grad());
    append(key, weight.scalar_type());
    append(key, weight.has_storage() ? weight.storage().unsafeGetStorageImpl() : nullptr);
    append(key, weight.has_storage() ? weight.storage_offset() : 0);
    if (weight.layout() == at::kStrided) append(key, weight.strides().data(), weight.dim() * sizeof(int64_t));
    append(key, weight.sizes().data(), weight.dim() * sizeof(int64_t));
    // hooks() asserts autograd metadata, which a parameter made with requires_grad=False (bitsandbytes) does not have.
    append(key, !torch::autograd::impl::get_autograd_meta(weight) ||
                    (torch::autograd::impl::hooks(weight).empty() && !torch::autograd::impl::post_acc_grad_hooks(weight)));
  });
  return found ? py::object(py::make_tuple(weights, py::bytes(key))) : py::none();
}

// Reference: traits_reference() in hf_mp/kernels/tensors.py.
py::tuple traits(const py::sequence& tensors, py::handle parameter) {
  std::string addresses, numels, kinds;
  std::optional<at::Device> device;
  for (py::handle each : tensors) {
    PyTypeObject* const type = Py_TYPE(each.ptr());
    const Tensor& tensor = THPVariable_Unpack(each.ptr());
    if (!device) device = tensor.device();
    const bool is_of_class = THPVariable_CheckTypeExact(type) || PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(parameter.ptr()));
    const bool is_plain = is_of_class && tensor.layout() == at::kStrided && tensor.is_contiguous() && tensor.device() == *device;
    const auto dtype = tensor.scalar_type();
    const bool is_kind = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kShort;
    append(addresses, is_plain ? reinterpret_cast<int64_t>(tensor.data_ptr()) : int64_t{0});
    append(numels, is_plain ? tensor.numel() : int64_t{0});
    kinds.push_back(is_plain && is_kind ? static_cast<char>(dtype) : '\xff');
  }
  return py::make_tuple(py::bytes(addresses), py::bytes(numels), py::bytes(kinds));
}

// Reference: _scale_jointly() and _are_plain() in hf_mp/scale_boundary.py. None if a gradient is not plain.
py::object scale_gradients(const py::list& gradients, const std::optional<Tensor>& factor, int64_t joined_elements) {
  std::vector<Tensor> scaled;
  std::map<at::ScalarType, std::vector<size_t>> by_dtype;
  for (py::handle each : gradients) {
    if (!THPVariable_CheckExact(each.ptr())) return py::none();
    const Tensor& gradient = THPVariable_Unpack(each.ptr());
    if (gradient.layout() != at::kStrided || gradient.dim() == 0 || gradient.key_set().has(DispatchKey::Batched)) return py::none();
    const bool is_alone = factor && gradient.numel() > joined_elements;
    if (!is_alone) by_dtype[gradient.scalar_type()].push_back(scaled.size());
    scaled.push_back(is_alone ? gradient * *factor : gradient);
  }
  const Tensor scalar = factor ? factor->squeeze() : Tensor();  // shape (1,) would take a launch for each gradient
  for (const auto& [dtype, indices] : by_dtype) {
    std::vector<Tensor> group;
    for (const size_t index : indices) group.push_back(scaled[index]);
    if (dtype == at::kHalf || dtype == at::kBFloat16) {
      std::vector<Tensor> results;
      for (const Tensor& gradient : group) results.push_back(at::empty_like(gradient, at::kFloat));
      at::_foreach_copy_(results, group);
      if (factor) at::_foreach_mul_(results, scalar);
      group = std::move(results);
    } else if (factor) {
      group = at::_foreach_mul(group, scalar);
    }
    for (size_t i = 0; i < indices.size(); ++i) scaled[indices[i]] = group[i];
  }
  return py::cast(scaled);
}

}  // namespace

PYBIND11_MODULE(hf_mp_native, module) {
  // Bytes by the names of Rule and OnCpu, in the order of the enumerations.
  const char* const rules[] = {"python", "unchanged", "lower_precision", "fp32", "fp32_output", "widest"};
  const char* const on_cpu[] = {"same", "python", "python_if_large", "through_fp32"};
  py::dict bytes;
  for (size_t i = 0; i < std::size(rules); ++i) {
    for (size_t j = 0; j < std::size(on_cpu); ++j) bytes[py::make_tuple(rules[i], on_cpu[j])] = i | j << CPU_SHIFT;
  }
  module.attr("RULES") = bytes;
  py::class_<Copies, std::shared_ptr<Copies>>(module, "Copies")
      .def(py::init<>())
      .def("add", &Copies::add)
      .def("validate", &Copies::validate)
      .def("invalidate", &Copies::invalidate);
  py::class_<Plan>(module, "Plan")
      .def(py::init([](py::bytes rules, at::ScalarType dtype, int64_t large, int64_t small) {
        return Plan{rules, dtype, {large, small}};
      }))
      .def("enter", [](const Plan& plan, std::shared_ptr<Copies> copies, bool is_reading) {
        running.push_back({&plan, std::move(copies), is_reading, torch::autograd::get_current_graph_task_id()});
      })
      .def("leave", [](const Plan&) { running.pop_back(); })
      .def("set_innermost", [](const Plan&, bool is_innermost) { running.back().is_innermost = is_innermost; });
  module.def("register_op", &register_op);
  module.def("has_no_external_edge", &has_no_external_edge);
  module.def("children", &children);
  module.def("weights_and_key", &weights_and_key);
  module.def("traits", &traits);
  module.def("scale_gradients", &scale_gradients);
}
