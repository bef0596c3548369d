#include "waterflow/executor/csrc/engine/simulation.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace waterflow {

DeviceClock::DeviceClock(int32_t lanes) {
  if (lanes <= 0) throw std::invalid_argument("a device has at least one lane; got " + std::to_string(lanes));
  lanes_.resize(lanes);
}

ItemId DeviceClock::add(int32_t lane, const Work& work, std::span<const ItemId> after) {
  const ItemId id = std::ssize(items_);
  const auto out_of = [](int64_t value, int64_t most) { return value < 0 || value > most; };
  if (lane < 0 || lane >= std::ssize(lanes_)) {
    throw std::invalid_argument("the device has " + std::to_string(lanes_.size()) + " lanes; got " +
                                std::to_string(lane));
  }
  if (out_of(work.nanoseconds, kLongest) || out_of(work.memory, Work::kWhole) || out_of(work.compute, Work::kWhole)) {
    throw std::invalid_argument("work takes 0 to " + std::to_string(kLongest) + " ns and shares of 0 to " +
                                std::to_string(Work::kWhole) + " millionths; got " + std::to_string(work.nanoseconds) +
                                " ns, " + std::to_string(work.memory) + " and " + std::to_string(work.compute));
  }
  for (const ItemId before : after) {
    if (out_of(before, id - 1)) {
      throw std::invalid_argument("an item comes after items that were added before it; item " + std::to_string(id) +
                                  " cannot come after " + std::to_string(before));
    }
  }
  Item item{lane, work};
  for (const ItemId before : after) {
    if (items_[before].ended()) continue;
    ++item.missing;
    edges_.push_back({id, items_[before].followers});
    items_[before].followers = std::ssize(edges_) - 1;
  }
  items_.push_back(item);
  lanes_[lane].queue.push_back(id);
  start_front(lane);
  return id;
}

std::optional<DeviceClock::Done> DeviceClock::next() {
  if (running_.empty()) return std::nullopt;
  const auto [until, number] = running_.top();
  running_.pop();
  advance(until - progress_);
  Lane& lane = lanes_[number];
  const ItemId id = lane.queue.front();
  Item& item = items_[id];
  item.end = now_;
  memory_ -= item.work.memory;
  compute_ -= item.work.compute;
  lane.queue.pop_front();
  lane.running = false;
  start_front(number);
  for (int64_t edge = item.followers; edge >= 0; edge = edges_[edge].next) {
    Item& follower = items_[edges_[edge].follower];
    --follower.missing;
    start_front(follower.lane);
  }
  return Done{id, number, now_};
}

void DeviceClock::start_front(int32_t number) {
  Lane& lane = lanes_[number];
  if (lane.running || lane.queue.empty()) return;
  Item& item = items_[lane.queue.front()];
  if (item.missing > 0) return;
  lane.running = true;
  item.start = now_;
  memory_ += item.work.memory;
  compute_ += item.work.compute;
  running_.push({progress_ + item.work.nanoseconds, number});
}

// Starts and ends lie where something ends or is added, that is, at whole nanoseconds of progress.
void DeviceClock::advance(int64_t progress) {
  const int64_t slowed = std::max({Work::kWhole, memory_, compute_});
  const int64_t fraction = progress * (slowed % Work::kWhole) + millionths_;
  progress_ += progress;
  now_ += progress * (slowed / Work::kWhole) + fraction / Work::kWhole;
  millionths_ = fraction % Work::kWhole;
}

void DeviceClock::check() const {
  int64_t memory = 0, compute = 0, running = 0;
  for (const Lane& lane : lanes_) {
    if (lane.running && lane.queue.empty()) throw std::logic_error("a lane runs nothing");
    if (!lane.queue.empty() && !lane.running && items_[lane.queue.front()].missing == 0) {
      throw std::logic_error("item " + std::to_string(lane.queue.front()) + " may start and does not run");
    }
    for (const ItemId id : lane.queue) {
      const Item& item = items_[id];
      const bool runs = lane.running && id == lane.queue.front();
      if (item.ended() || (item.start >= 0) != runs || (runs && item.missing > 0)) {
        throw std::logic_error("item " + std::to_string(id) + " is in the wrong state");
      }
      memory += runs ? item.work.memory : 0;
      compute += runs ? item.work.compute : 0;
      running += runs;
    }
  }
  if (memory != memory_ || compute != compute_ || running != std::ssize(running_)) {
    throw std::logic_error("what runs does not add up");
  }
}

namespace {

constexpr int64_t kGranularity = 64;
constexpr size_t kMostTold = 16;

int64_t rounded_up(int64_t bytes) { return (bytes + kGranularity - 1) / kGranularity * kGranularity; }

// splitmix64: the same numbers with every compiler, which the standard library's distributions do not promise.
uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

SimulatedStep::SimulatedStep(Heights heights_, std::vector<std::vector<Work>> work_, std::vector<int64_t> first_,
                             std::vector<Touch> touches_, int64_t copy_ns)
    : heights(std::move(heights_)),
      work(std::move(work_)),
      first(std::move(first_)),
      touches(std::move(touches_)),
      copy_ns(copy_ns) {
  const auto groups = static_cast<size_t>(heights.groups());
  if (work.size() != groups || first.size() != groups + 1 || first.front() != 0 ||
      first.back() != static_cast<int64_t>(touches.size()) || !std::is_sorted(first.begin(), first.end()) ||
      std::any_of(work.begin(), work.end(), [](const auto& operations) { return operations.empty(); })) {
    throw std::invalid_argument("a step of " + std::to_string(groups) +
                                " groups needs a time for each, and where its touches begin and end");
  }
}

Simulation::Simulation(const SimulationSettings& settings)
    : settings_(settings), clock_(3), admission_(settings.arena), order_(settings.fault), random_(settings.seed) {
  if (settings.arena <= 0 || settings.run_ahead <= 0) {
    throw std::invalid_argument("a simulation needs an arena with bytes, and lanes that may hold a group or more");
  }
  const int64_t arena = rounded_up(settings.arena);
  device_ = std::make_unique<SimulatedDevice>(int64_t{1} << 62, kGranularity);
  base_ = device_->reserve(arena);
  if (base_ == 0 || !device_->grow(base_, arena)) throw std::invalid_argument("no addresses are left");
  for (int32_t i = 0; i < 2; ++i) lanes_[i] = Lane{i, device_->add_stream()};
  copies_ = device_->add_stream();
}

Simulation::~Simulation() = default;

void Simulation::add_job(std::shared_ptr<const SimulatedStep> step, int32_t steps) {
  if (step->heights.largest() > settings_.arena) {
    throw std::invalid_argument("a step that reaches " + std::to_string(step->heights.largest()) +
                                " bytes does not fit into an arena of " + std::to_string(settings_.arena));
  }
  auto job = std::make_unique<Job>();
  job->number = static_cast<int32_t>(jobs_.size());
  job->step = std::move(step);
  job->steps = steps;
  // What persists and the batch lie outside of the arena; a few bytes stand for them.
  job->state = device_->reserve(2 * kGranularity);
  job->batch = job->state + kGranularity;
  if (job->state == 0 || !device_->grow(job->state, 2 * kGranularity)) {
    throw std::invalid_argument("no addresses are left");
  }
  for (int32_t g = 0; g < job->step->heights.groups(); ++g) {
    job->barriers.emplace_back(g == 0 ? CounterBarrier::kFirstGroup : CounterBarrier::kLaterGroup);
  }
  job->barriers[0].arrive();  // there is no step before the first
  result_.steps.push_back(0);
  jobs_.push_back(std::move(job));
}

SimulationResult Simulation::run() {
  for (auto& job : jobs_) {
    if (job->steps > 0) copy_batch(*job);
  }
  while (true) {
    while (issue_one()) {
    }
    const auto done = clock_.next();
    if (!done) break;
    handle(*done);
  }
  for (const auto& job : jobs_) {
    if (job->done != job->steps) {
      throw std::logic_error("job " + std::to_string(job->number) + " is stuck in step " + std::to_string(job->done) +
                             " before group " + std::to_string(job->group));
    }
  }
  admission_.check();
  order_.check();
  measure();
  return std::move(result_);
}

void Simulation::handle(const DeviceClock::Done& done) {
  if (done.lane < std::ssize(lanes_)) {
    Lane& lane = lanes_[done.lane];
    const EventId event = lane.in_flight.front();
    if (items_.at(event) != done.item) return;  // in mid-group
    lane.in_flight.pop_front();
    if (!settings_.host_learns) return;
    device_->advance(event);
    if (!device_->complete(event)) throw std::logic_error("a group is done and its event is not");
    order_.reached(lane.index, event);
    return;
  }
  Job& job = *copying_.front();
  copying_.pop_front();
  job.barriers[0].arrive();
  ready_.push_back(&job);
}

// -- the host

// Issues the first group that may be issued; false where all have to wait for the device.
bool Simulation::issue_one() {
  for (auto id : admission_.waiting()) {
    Job& job = *jobs_[id];
    if (job.lane >= 0 ? go_on(lanes_[job.lane]) : start(job)) return true;
  }
  for (auto& lane : lanes_) {
    if (lane.job != nullptr && go_on(lane)) return true;
  }
  for (Job* job : ready_) {
    if (start(*job)) return true;
  }
  return false;
}

bool Simulation::go_on(Lane& lane) {
  Job& job = *lane.job;
  if (has_enough(lane)) return false;
  if (!admission_.try_issue(job.number, &job.step->heights)) {
    admission_.wait(job.number);
    return false;
  }
  if (!settings_.early_issue) job.barriers[job.group].arrive();  // room
  issue(job);
  return true;
}

bool Simulation::start(Job& job) {
  const auto lane = std::find_if(lanes_.begin(), lanes_.end(),
                                 [this](const Lane& each) { return each.job == nullptr && !has_enough(each); });
  if (lane == lanes_.end()) return false;
  if (!admission_.try_issue(job.number, &job.step->heights)) {
    admission_.wait(job.number);
    return false;
  }
  ready_.erase(std::find(ready_.begin(), ready_.end(), &job));
  job.lane = lane->index;
  lane->job = &job;
  if (!settings_.early_issue) job.barriers[0].arrive();  // room
  issue(job);
  return true;
}

// The next group of a job that admission has let through. It is issued at once, so it holds its peak for no time at
// all; what it gives back is there for others, who wait for it on the device.
void Simulation::issue(Job& job) {
  Lane& lane = lanes_[job.lane];
  const SimulatedStep& step = *job.step;
  const int32_t group = job.group;
  const int64_t peak = step.heights.peak[group], after = step.heights.after[group];
  job.barriers[group].pass();

  if (group == 0) {
    wait(lane.stream, job.last);
    wait(lane.stream, job.copied);
  }
  const auto facing = order_.before(lane.index, peak, settings_.arena);
  wait(lane.stream, facing);
  result_.waits += facing.has_value();
  lane.held = peak;
  if (held() > settings_.arena) {
    throw std::logic_error("an arena of " + std::to_string(settings_.arena) + " bytes holds " + std::to_string(held()));
  }
  touch(job, lane);
  lane.held = after;

  ItemId first = -1, last = -1;
  const auto take = [&](const Work& work) {
    last = enqueue(lane.index, work);
    if (first < 0) first = last;
    result_.alone += work.nanoseconds;
  };
  for (const Work& work : step.work[group]) take(work);
  if (const int64_t longer = stall(); longer > 0) take({longer});
  const EventId event = record(lane.stream, last);
  order_.after(lane.index, peak, event, after);
  lane.in_flight.push_back(event);
  of_spans_.emplace_back(first, last);
  result_.spans.push_back({job.number, job.done, group, lane.index, clock_.now(), -1, -1, peak, after});

  if (!admission_.complete(job.number)) {
    job.barriers[++job.group].arrive();  // the group before
    return;
  }
  lane.held = 0;
  lane.job = nullptr;
  job.lane = -1;
  job.group = 0;
  job.last = event;
  job.barriers[0].arrive();  // the step before
  result_.steps[job.number] = ++job.done;
  if (job.done < job.steps) copy_batch(job);
}

// -- the device

void Simulation::touch(const Job& job, const Lane& lane) {
  const SimulatedStep& step = *job.step;
  for (int64_t i = step.first[job.group]; i < step.first[job.group + 1]; ++i) {
    const Touch& touch = step.touches[i];
    const int64_t from = lane.index == 0 ? touch.offset : settings_.arena - touch.offset - touch.bytes;
    access(job, lane.stream, base_ + from, touch.bytes, touch.write);
  }
  access(job, lane.stream, job.batch, kGranularity, false);
  access(job, lane.stream, job.state, kGranularity, true);
}

void Simulation::access(const Job& job, StreamId stream, uintptr_t at, int64_t bytes, bool write) {
  try {
    device_->access(stream, at, bytes, write);
  } catch (const Race& race) {
    ++result_.races;
    if (result_.told.size() == kMostTold) return;
    result_.told.push_back("group " + std::to_string(job.group) + " of step " + std::to_string(job.done) + " of job " +
                           std::to_string(job.number) + ": " + race.what());
  }
}

// One batch on the device: the next one is copied once the step that read the last one is done.
void Simulation::copy_batch(Job& job) {
  wait(copies_, job.last);
  access(job, copies_, job.batch, kGranularity, true);
  job.copied = record(copies_, enqueue(static_cast<int32_t>(lanes_.size()), {job.step->copy_ns}));
  copying_.push_back(&job);
}

void Simulation::wait(StreamId stream, std::optional<EventId> event) {
  if (!event) return;
  device_->wait(stream, *event);
  waited_for_.push_back(items_.at(*event));
}

ItemId Simulation::enqueue(int32_t lane, const Work& work) {
  const ItemId item = clock_.add(lane, work, waited_for_);
  waited_for_.clear();
  return item;
}

EventId Simulation::record(StreamId stream, ItemId behind) {
  const EventId event = device_->record(stream);
  items_.emplace(event, behind);
  return event;
}

int64_t Simulation::stall() {
  if (settings_.stalled == 0 || settings_.stall_ns == 0) return 0;
  if (static_cast<int32_t>(next_random(random_) % 1000) >= settings_.stalled) return 0;
  return static_cast<int64_t>(next_random(random_) % static_cast<uint64_t>(settings_.stall_ns + 1));
}

// -- afterwards

void Simulation::measure() {
  // What ends at some time makes room before anything begins; a group that takes no time only leaves what it leaves.
  // Times are in whole nanoseconds here.
  struct Edge {
    int64_t at;
    bool starts;
    size_t span;
  };
  std::vector<Edge> edges;
  result_.busy.assign(lanes_.size(), 0);
  for (size_t i = 0; i < result_.spans.size(); ++i) {
    auto& span = result_.spans[i];
    span.start = clock_.start_of(of_spans_[i].first);
    span.end = clock_.end_of(of_spans_[i].second);
    result_.busy[span.lane] += span.end - span.start;
    if (span.start < span.end) edges.push_back({span.start, true, i});
    edges.push_back({span.end, false, i});
    result_.makespan = std::max(result_.makespan, span.end);
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) {
    return std::tie(a.at, a.starts, a.span) < std::tie(b.at, b.starts, b.span);
  });
  for (auto& lane : lanes_) lane.held = 0;
  int32_t busy = 0;
  int64_t since = 0;
  for (const auto& [at, starts, index] : edges) {
    const auto& span = result_.spans[index];
    if (busy >= 2) result_.overlapped += at - since;
    since = at;
    if (span.start < span.end) busy += starts ? 1 : -1;
    lanes_[span.lane].held = starts ? span.peak : span.after;
    result_.peak = std::max(result_.peak, held());
  }
}

}  // namespace waterflow
