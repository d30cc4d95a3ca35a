// Communicator of a build without MPI: one rank, which already has all data.
#include <algorithm>
#include <cstdlib>
#include <kvzap/core/communicator.hpp>

namespace kvzap {

Communicator Communicator::world() { return {}; }
Communicator Communicator::self() { return {}; }

void Communicator::barrier() const {}
void Communicator::abort(int status) const { std::_Exit(status); }
int Communicator::ranks_on_node() const { return 1; }

void Communicator::all_reduce_sum(float*, std::size_t) const {}
std::int64_t Communicator::all_reduce_sum(std::int64_t value) const { return value; }
void Communicator::all_reduce_sum(std::int64_t*, std::size_t) const {}
std::int64_t Communicator::all_reduce_max(std::int64_t value) const { return value; }
void Communicator::all_reduce_max(std::int64_t*, std::size_t) const {}
void Communicator::all_reduce_sum(double*, std::size_t) const {}
void Communicator::all_reduce_max(double*, std::size_t) const {}
void Communicator::broadcast(void*, std::size_t, int) const {}

std::vector<std::vector<std::int64_t>> Communicator::all_gather(
    const std::vector<std::int64_t>& values) const {
  return {values};
}

std::vector<float> Communicator::gather(const float* values, std::size_t count, int) const {
  return {values, values + count};
}

void Communicator::gather(const float* values, const std::vector<std::int64_t>& counts, float* all,
                          int /*root*/) const {
  std::copy_n(values, counts.at(0), all);
}

void Communicator::all_gather(const float* values, const std::vector<std::int64_t>& counts,
                              float* all) const {
  std::copy_n(values, counts.at(0), all);
}

void Communicator::exchange(const float* values, const std::vector<std::int64_t>& sent, float* all,
                            const std::vector<std::int64_t>& /*received*/) const {
  std::copy_n(values, sent.at(0), all);
}

void Communicator::transfer(char*, std::size_t, int, int) const {}

Traffic Communicator::traffic() { return {}; }

}  // namespace kvzap
